"""Runs tests that need a CUDA device on the simulated one: as pytest does, with its arguments.

    FAKE_CUDA_LIBRARY=... python -m tests.fake_cuda.suite -m gpu tests/gpu/test_cuda.py

A test fails if its device has noted a fault; so do ranks of the worlds that it runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.fake_cuda.preload import own


class Faults:
    """Fails each test in which the device of this process has noted a fault."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> object:
        own.report()
        result = yield
        _judge()
        return result


def _judge() -> None:
    faults = own.report()["faults"]
    assert not faults, "\n".join(faults)


def checked(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on a rank, and fail if the rank's device has noted a fault."""
    result = function(*args)
    _judge()
    return result


def main(arguments: list[str]) -> int:
    """Run pytest on the device; returns its exit code."""
    from megapipe import testing

    run_ranks = testing.run_ranks

    def run_checked(context: Any, world: int, function: Any, *args: Any, **limits: Any) -> Any:
        return run_ranks(context, world, functools.partial(checked, function), *args, **limits)

    testing.run_ranks = run_checked
    testing.PRELOAD = ("tests.fake_cuda.preload", *testing.PRELOAD)  # type: ignore[assignment]
    return int(pytest.main(arguments, plugins=[Faults()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
