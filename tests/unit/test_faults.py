"""Seeded faults, some of which tests of worlds draw: each still finds what it is to change."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import tests.parity
from tests.parity.faults import Patch


def faults() -> Iterator[Callable[[], Patch]]:
    """Yield the functions of tests/parity that return a patch and take nothing."""
    for file in sorted(Path(tests.parity.__path__[0]).glob("*faults.py")):
        module = importlib.import_module(f"tests.parity.{file.stem}")
        for function in vars(module).values():
            if not inspect.isfunction(function) or function.__module__ != module.__name__:
                continue
            signature = inspect.signature(function)
            if signature.return_annotation == "Patch" and not signature.parameters:
                yield function


def test_each_can_be_put_in_place() -> None:
    found = list(faults())
    assert len(found) > 200
    for fault in found:
        with fault():
            pass
