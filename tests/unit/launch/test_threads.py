"""Several processes of a host compute in one thread each, unless the environment says otherwise."""

from __future__ import annotations

import os

import pytest

from megapipe.launch.launch_info import spare_threads

NAME = "OMP_NUM_THREADS"


@pytest.mark.parametrize(
    ("processes", "given", "found"), [(1, None, None), (2, None, "1"), (2, "3", "3")]
)
def test_threads(
    processes: int, given: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, "to be restored")
    del os.environ[NAME]
    if given is not None:
        os.environ[NAME] = given
    spare_threads(processes)
    assert os.environ.get(NAME) == found
