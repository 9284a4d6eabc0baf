"""Programs that tests of scripts put in the place of real ones."""

import sys
from pathlib import Path

from tests.parity.jobs import ROOT


def write_program(path: Path, text: str) -> None:
    """Write a file that can be executed."""
    path.write_text(text)
    path.chmod(0o755)


def write_interpreter(folder: Path) -> None:
    """Have a folder from which jobs are submitted begin this Python, and find this package."""
    (folder / ".venv/bin").mkdir(parents=True)
    text = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n'
    write_program(folder / ".venv/bin/python", text)
