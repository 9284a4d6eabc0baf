"""Tests on the device are skipped if it cannot be built or torch has real ones. They do not run by
default: compiling it takes a minute."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.fake_cuda import build

HERE = Path(__file__).parent


def reason_to_skip() -> str | None:
    if sys.platform != "linux":
        return f"a device of type cuda is built on Linux, not on {sys.platform}"
    if torch.backends.cuda.is_built():
        return "this torch has CUDA: a device of type cuda is built for one that has not"
    try:
        build.compiler()
    except build.NoCompiler as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = reason_to_skip()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.full if reason is None else pytest.mark.skip(reason=reason))
