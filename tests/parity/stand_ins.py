"""Programs that tests of scripts put in place of real ones."""

import sys
from pathlib import Path

from tests.parity.jobs import ROOT


def write_program(path: Path, text: str) -> None:
    """Write an executable file."""
    path.write_text(text)
    path.chmod(0o755)


def write_interpreter(folder: Path) -> None:
    """Make jobs that are submitted from a folder start this Python, and find this package."""
    (folder / ".venv/bin").mkdir(parents=True)
    text = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n'
    write_program(folder / ".venv/bin/python", text)
