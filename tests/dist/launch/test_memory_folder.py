"""Folders in memory, of processes that end."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from megapipe.launch.memory_folder import OWNER, PREFIX, MemoryFolder
from megapipe.util import heartbeat


def test_it_goes_with_a_process_that_ends_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from megapipe.launch.memory_folder import MemoryFolder\n"
        "with MemoryFolder(True, Path(sys.argv[1])) as memory: memory.leave(75)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert done.returncode == 75
    assert list(tmp_path.iterdir()) == []


def test_what_killed_launchers_have_left_is_removed(tmp_path: Path) -> None:
    """And nothing else: not of one that lives, of another machine, or that has not said whose it
    is; no link, and no file."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    me = heartbeat.Owner.this_process()
    owners = {
        "dead": replace(me, process=ended.pid),
        "alive": me,
        "elsewhere": replace(me, process=ended.pid, machine="another"),
        "silent": None,
    }
    ended.wait()
    for name, owner in owners.items():
        folder = tmp_path / f"{PREFIX}{name}"
        folder.mkdir()
        if owner is not None:
            (folder / OWNER).write_text(json.dumps(asdict(owner)))
    target = tmp_path / "of-others"
    target.mkdir()
    (target / OWNER).write_text(json.dumps(asdict(owners["dead"])))
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}file").touch()
    with MemoryFolder(True, tmp_path) as memory:
        assert memory.path is not None
        left = {path.name.removeprefix(PREFIX) for path in tmp_path.iterdir()} - {
            memory.path.name.removeprefix(PREFIX)
        }
    assert left == {"alive", "elsewhere", "silent", "of-others", "link", "file"}
    assert (target / OWNER).exists()
