"""Whether processes of tests start a compiler: they note it in a file of their worker."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("g++", "gcc", "c++", "cc", "clang++", "clang", "ninja")


def is_compiler(program: Any) -> bool:
    """Whether a program that is started compiles."""
    return name_of(program) in NAMES


def name_of(program: Any) -> str:
    """Return the name of a program without its folder."""
    return Path(os.fsdecode(program)).name


def note_of(worker: int) -> Path:
    """The file in which the processes of a worker note that they compile."""
    return Path(tempfile.gettempdir()) / f"megapipe-tests-{worker}-compile"


def note_compilers(note: Path) -> None:
    """Have this process and its forks note each compiler that they start."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and is_compiler(arguments[0]):
            with note.open("ab") as file:
                file.write(b"\n")

    sys.addaudithook(audit)
