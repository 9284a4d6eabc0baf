"""Token files that appear complete or not at all, and never replace other files."""

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
    """Raise a DataError if a file with the prefix exists."""
    for path in (bin_of(prefix), idx_of(prefix)):
        if exists(path):
            raise _exists(path)


def _exists(path: Path) -> DataError:
    return DataError(f"{path} exists: remove it or choose another name")


def rename_noreplace(source: Path, target: Path) -> None:
    """Rename a file; do nothing if an earlier call has renamed it.

    Raises:
        DataError: another file has the new name.
        OSError: the file cannot be renamed.
    """
    try:
        os.link(source, target)  # unlike a rename, it replaces nothing
    except FileNotFoundError:
        if not target.exists():
            raise
        return
    except FileExistsError:
        if not target.samefile(source):
            raise _exists(target) from None
    except OSError:  # a file system without hard links
        if target.exists():
            raise _exists(target) from None
        source.rename(target)
        return
    source.unlink()


@contextmanager
def fresh(prefix: Path) -> Iterator[Path]:
    """Yield a temporary prefix to write under; on success the files are renamed to `prefix`. The
    temporary prefix names this process, so that a later process can remove the files if this one is
    killed.

    Raises:
        DataError: a file with the prefix exists, or cannot be written.
    """
    refuse_existing(prefix)
    working = prefix.with_name(f".{prefix.name}.{_here()}-{_process(os.getpid())}")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        _clear(prefix)
        yield working
        for name in (bin_of, idx_of):
            rename_noreplace(name(working), name(prefix))
    except OSError as error:
        raise DataError(f"{error.filename or prefix}: {error.strerror or error}") from error
    finally:
        for path in (bin_of(working), idx_of(working)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _here() -> str:
    return hashlib.sha256(machine().encode()).hexdigest()[:8]


def _process(pid: int) -> str | None:
    """Return a text that identifies process `pid` on this machine; None if it has ended."""
    began = start_of(pid)
    return None if began is None else f"{pid}-{began:.0f}"


def _clear(prefix: Path) -> None:
    """Remove the files that ended processes of this machine were writing for `prefix`. Files of
    other machines stay, as their processes may be alive."""
    start = f".{prefix.name}.{_here()}-"
    for path in prefix.parent.glob(f"{glob.escape(start)}*"):
        process = path.stem.removeprefix(start)
        pid = process.partition("-")[0]
        if pid.isdecimal() and _process(int(pid)) != process:
            path.unlink(missing_ok=True)
