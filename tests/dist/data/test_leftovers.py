"""Folders of a killed preparation, and of one that is at work."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megapipe.data.prepare.build_once import build_once

MAKES = """
import sys, time
from pathlib import Path
from megapipe.data.prepare.build_once import build_once
folder, go = map(Path, sys.argv[1:])

def fill(new):
    (new / "writing").write_text("x" * 1000000)
    (new / "writing").rename(new / "content")
    while not go.exists():
        time.sleep(0.02)

build_once(folder, fill)
"""


def make(cache: Path) -> list[str]:
    """Return the lines that a preparation in the cache prints."""
    lines: list[str] = []
    build_once(cache / "new", lambda new: (new / "content").touch(), lines.append)
    return lines


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_of_two_processes_the_killed_ones_goes_and_the_living_ones_stays(tmp_path: Path) -> None:
    cache, go = tmp_path / "cache", tmp_path / "go"
    killed, living = (
        subprocess.Popen([sys.executable, "-c", MAKES, str(cache / name), str(go)])
        for name in ("aa", "bb")
    )
    try:
        for name in ("aa", "bb"):
            attempt = cache / f".{name}.1"
            wait_for(lambda attempt=attempt: (attempt / "content").exists())
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        lines = make(cache)
        assert lines == [f"removed 1 folder, 1.0 MB, that killed preparations had left in {cache}"]
        assert (cache / ".bb.1" / "content").exists()
        go.touch()
        assert living.wait(60) == 0
    finally:
        for process in (killed, living):
            process.kill()
            process.wait()
    assert sorted(path.name for path in cache.iterdir()) == ["bb", "new"]
    assert (cache / "bb" / "content").stat().st_size == 1_000_000
