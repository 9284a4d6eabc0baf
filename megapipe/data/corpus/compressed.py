"""Files opened by their suffix: as they are, or through gzip, xz or zstd."""

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, cast

from megapipe.errors import DataError
from megapipe.words import one_line

SUFFIXES = (".gz", ".xz", ".zst")


class Opened(NamedTuple):
    """A file being read."""

    content: IO[bytes]
    """Its content, unpacked."""
    raw: IO[bytes]
    """The file itself; its position tells how far the reader is."""


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def inner_suffix(path: Path) -> str:
    """Suffix, in lower case, of what a file holds: ``.jsonl`` of a ``.jsonl.gz``."""
    return (Path(path.stem) if is_compressed(path) else path).suffix.lower()


@contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """The content of a file. Whatever reading raises inside comes out as a DataError that names it.

    Raises:
        DataError: the file cannot be opened, is cut short, or is not what its suffix says.
    """
    try:
        with open(path, "rb") as raw:
            yield Opened(_unpacked(path, raw), raw)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"corpus file {path}: {error.strerror}") from error
        raise DataError(f"corpus file {path}: cannot be unpacked ({one_line(error)})") from error


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
