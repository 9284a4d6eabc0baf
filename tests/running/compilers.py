"""Whether processes of tests compile: ranks note it in a file of the worker that runs the tests."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
PROGRAMS = ("g++", "gcc", "c++", "cc", "clang++", "clang", "ninja")


def compiles(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an event of the interpreter is a compiler that is started, or a function of this
    repository that torch traces: it makes another code object of the function's."""
    if event == "subprocess.Popen":
        return name_of(arguments[0]) in PROGRAMS
    if event == "code.__new__":
        file = arguments[1]
        return file.startswith(ROOT) and "site-packages" not in file
    return False


def name_of(program: Any) -> str:
    """Return the name of a program without its folder."""
    return Path(os.fsdecode(program)).name


def note_of(worker: int) -> Path:
    """Return the file in which the processes of a worker note that they compile."""
    return Path(tempfile.gettempdir()) / f"megapipe-tests-{worker}-compile"


def note_compilation(note: Path) -> None:
    """Have this process and its forks add a line to the file each time that they compile."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if compiles(event, arguments):
            with note.open("ab") as file:
                file.write(b"\n")

    sys.addaudithook(audit)
