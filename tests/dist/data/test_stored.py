"""The limit of open files, of a process that reads many."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.token_files import ROWS, written


@pytest.fixture(params=[True, False], ids=["with checksums", "without"])
def checked(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_many_files_raise_the_limit_of_open_ones(tmp_path: Path) -> None:
    written(tmp_path / "x")
    program = f"""
import resource
from pathlib import Path
from megapipe.data.tokens import TokenFile
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
files = [TokenFile(Path({str(tmp_path / "x")!r})) for _ in range(30)]
print(sum(len(file) for file in files))
resource.setrlimit(resource.RLIMIT_NOFILE, (70, 70))
try:
    files += [TokenFile(Path({str(tmp_path / "x")!r})) for _ in range(30)]
except Exception as error:
    print(type(error).__name__, error)
"""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 100
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    first, second = done.stdout.splitlines()
    assert first == str(30 * ROWS)
    assert second.startswith("DataError ")
    assert second.endswith(": Too many open files (70): expected a larger ulimit -Hn on this host")
