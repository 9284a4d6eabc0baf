"""Token files that are there in full or not at all, and never replace others."""

import contextlib
import glob
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megapipe.data.tokens.format import bin_of, idx_of
from megapipe.errors import DataError
from megapipe.util.paths import exists
from megapipe.util.processes import machine, start_of


def refuse_existing(prefix: Path) -> None:
    """Raise a DataError if a file of that prefix is there."""
    for path in (bin_of(prefix), idx_of(prefix)):
        if exists(path):
            raise _exists(path)


def _exists(path: Path) -> DataError:
    return DataError(f"{path} exists: remove it or choose another name")


def give_name(source: Path, target: Path) -> None:
    """Rename a file, if no other has that name; one that was renamed before is left.

    Raises:
        DataError: another file has the name.
        OSError: it cannot be renamed.
    """
    try:
        os.link(source, target)  # which, unlike a rename, replaces nothing
    except FileNotFoundError:
        if not target.exists():
            raise
        return
    except FileExistsError:
        if not target.samefile(source):
            raise _exists(target) from None
    except OSError:  # a file system without links
        if target.exists():
            raise _exists(target) from None
        source.rename(target)
        return
    source.unlink()


@contextmanager
def fresh(prefix: Path) -> Iterator[Path]:
    """A prefix to write under, whose files get the name `prefix` when that went well. It says whose
    it is, so that files of a process that was killed are removed by the next one.

    Raises:
        DataError: a file of that name exists, or cannot be written.
    """
    refuse_existing(prefix)
    working = prefix.with_name(f".{prefix.name}.{_here()}-{_process(os.getpid())}")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        _clear(prefix)
        yield working
        for name in (bin_of, idx_of):
            give_name(name(working), name(prefix))
    except OSError as error:
        raise DataError(f"{error.filename or prefix}: {error.strerror or error}") from error
    finally:
        for path in (bin_of(working), idx_of(working)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _here() -> str:
    return hashlib.sha256(machine().encode()).hexdigest()[:8]


def _process(pid: int) -> str | None:
    """A name that no other process of this machine has had or will have; None if it has ended."""
    began = start_of(pid)
    return None if began is None else f"{pid}-{began:.0f}"


def _clear(prefix: Path) -> None:
    """Remove what processes of this machine that have ended were writing for `prefix`. Of those of
    other machines it is not known."""
    start = f".{prefix.name}.{_here()}-"
    for path in prefix.parent.glob(f"{glob.escape(start)}*"):
        process = path.stem.removeprefix(start)
        pid = process.partition("-")[0]
        if pid.isdecimal() and _process(int(pid)) != process:
            path.unlink(missing_ok=True)
