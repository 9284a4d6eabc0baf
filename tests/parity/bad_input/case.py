"""Mistakes of users when they start a run, and the errors that they should get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.parity.jobs import arguments, tiny

Prepare = Callable[[Path], object]
TIMEOUT_S = 100
"""Seconds for which a rank would wait for another one."""


@dataclass(frozen=True)
class Bad:
    """A mistake: arguments of train.py, the exit code of every rank, words of the error line.

    `prepare` changes the folder, a copy of what `make_folder` makes. `places` and `environ` are
    variables of the ranks; for `privileged` see :func:`~tests.parity.launches.run_forked`. `late`:
    the line comes after the corpus was prepared, or after other lines. `before_groups`: it comes
    before any process group, and so before the folder of the run.
    """

    name: str
    argv: str | tuple[str, ...]
    code: int
    words: tuple[str, ...]
    prepare: Prepare = lambda folder: None
    ranks: int = 2
    late: bool = False
    before_groups: bool = False
    places: Mapping[str, str | None] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    privileged: bool = True
    without: tuple[str, ...] = ()
    """Prefixes of keys that the small run then does not set."""

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments of a small run, followed by the wrong ones."""
        usual = {
            key: value
            for key, value in (tiny(folder) | {"parallel.timeout_s": f"{TIMEOUT_S}"}).items()
            if str(folder) not in value and not key.startswith(self.without)
        }
        given = self.argv.split() if isinstance(self.argv, str) else self.argv
        return [*arguments({**usual, "data.source": "texts.txt"}), *given]


def all_of(*changes: Prepare) -> Prepare:
    """Make several changes, one after the other."""

    def prepare(folder: Path) -> None:
        for change in changes:
            change(folder)

    return prepare


def mode(name: str, bits: int) -> Prepare:
    """Set the permissions of a file or folder."""
    return lambda folder: (folder / name).chmod(bits)


def made(name: str) -> Prepare:
    """Make a folder."""
    return lambda folder: (folder / name).mkdir(parents=True)


def link(name: str, target: str) -> Prepare:
    """Make a symbolic link."""

    def prepare(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)

    return prepare
