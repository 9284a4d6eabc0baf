"""Programs that tests of scripts put in the place of real ones."""

from pathlib import Path


def write_program(path: Path, text: str) -> None:
    """Write a file that can be executed."""
    path.write_text(text)
    path.chmod(0o755)
