"""Tests on the device are skipped where it cannot be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda import build

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        build.compiler()
    except build.NoCompiler as error:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=str(error)))
