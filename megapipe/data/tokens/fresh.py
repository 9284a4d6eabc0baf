"""Token files that are there in full or not at all, and never replace others."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megapipe.data.tokens.format import bin_of, idx_of
from megapipe.errors import DataError
from megapipe.paths import exists


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
    """A prefix to write under, whose files get the name `prefix` when that went well.

    Raises:
        DataError: a file of that name exists, or cannot be written.
    """
    refuse_existing(prefix)
    working = prefix.with_name(f".{prefix.name}.{uuid.uuid4().hex}")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        yield working
        for name in (bin_of, idx_of):
            give_name(name(working), name(prefix))
    except OSError as error:
        raise DataError(f"{error.filename or prefix}: {error.strerror or error}") from error
    finally:
        for path in (bin_of(working), idx_of(working)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
