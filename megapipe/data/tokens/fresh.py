"""Token files that are there in full or not at all, and never replace others."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megapipe.data.tokens.format import bin_of, idx_of
from megapipe.errors import DataError


def refuse_existing(prefix: Path) -> None:
    """Raise a DataError if a file of that prefix is there."""
    for path in (bin_of(prefix), idx_of(prefix)):
        if path.exists():
            raise DataError(f"{path} exists: remove it or choose another name; nothing was written")


@contextmanager
def fresh(prefix: Path) -> Iterator[Path]:
    """A prefix to write under, whose files get the name `prefix` when that went well.

    Raises:
        DataError: a file of that name exists, or cannot be written.
    """
    refuse_existing(prefix)
    working = prefix.with_name(f".{prefix.name}.{os.getpid()}")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        yield working
        refuse_existing(prefix)  # which another process may have written since
        bin_of(working).rename(bin_of(prefix))
        idx_of(working).rename(idx_of(prefix))
    except OSError as error:
        raise DataError(f"{error.filename or prefix}: {error.strerror or error}") from error
    finally:
        for path in (bin_of(working), idx_of(working)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
