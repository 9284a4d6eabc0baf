"""Opening of plain files, and of files compressed with gzip, xz or zstd, by their suffix."""

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, cast

from megapipe.errors import DataError
from megapipe.text import one_line

SUFFIXES = (".gz", ".xz", ".zst")


class Opened(NamedTuple):
    """A file that is open for reading."""

    content: IO[bytes]
    """Decompressed content."""
    raw: IO[bytes]
    """The file itself; its position is the number of bytes read so far."""


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def inner_suffix(path: Path) -> str:
    """Return a file's lower-case suffix without compression: ``.jsonl`` for ``x.jsonl.gz``."""
    return (Path(path.stem) if is_compressed(path) else path).suffix.lower()


@contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """Open a file and decompress it if need be. An error while the file is read becomes a DataError
    that names the file.

    Raises:
        DataError: the file cannot be opened, is truncated, or has another format than its suffix.
    """
    try:
        with open(path, "rb") as raw:
            yield Opened(_unpacked(path, raw), raw)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"corpus file {path}: {error.strerror}") from error
        raise DataError(f"corpus file {path} cannot be decompressed ({one_line(error)})") from error


def _unpacked(path: Path, raw: IO[bytes]) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if suffix == ".xz":
        return cast(IO[bytes], lzma.LZMAFile(raw))
    if suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), 2**20)
    return raw
