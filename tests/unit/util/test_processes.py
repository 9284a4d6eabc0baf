"""A unit test that starts a process fails, however it does that, and is told where it belongs."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

WAYS: dict[str, Callable[[], object]] = {
    "run": lambda: subprocess.run([sys.executable, "-c", ""], check=False),
    "output": lambda: subprocess.check_output("true", shell=True),
    "fork": os.fork,
    "posix_spawn": lambda: os.posix_spawn(sys.executable, ["python"], {}),
    "system": lambda: os.system("true"),
    **{
        method: lambda method=method: multiprocessing.get_context(method).Process().start()
        for method in ("fork", "spawn", "forkserver")
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_refused(way: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"^it starts a process, .* in tests/dist$"):
        WAYS[way]()
