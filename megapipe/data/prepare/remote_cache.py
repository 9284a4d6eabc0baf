"""Cached copies of files on object storage: ``remote-DIGEST``.

The files are in a folder ``files``, next to a manifest with the size and the SHA-256 of each file.
Each start compares the sizes. The SHA-256 of texts are compared before the texts are tokenized.
Token files have a checksum per 64 KiB, which is compared when these bytes are first read.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from megapipe.config.section import Section
from megapipe.data.prepare.progress import meter
from megapipe.errors import DataError
from megapipe.util.paths import user_path
from megapipe.util.process_pool import cores

FILES, MANIFEST = "files", "manifest.json"
AT_ONCE = 2**22
"""Number of bytes that are read at a time."""


class Copied(Section):
    """Size and SHA-256 of a copied file."""

    size: int
    sha256: str


class Manifest(Section):
    """Content of a copy's manifest."""

    source: str
    files: dict[str, Copied]
    """The copied files, by path in the folder ``files``."""


def copied(path: Path) -> Copied:
    """Read a file, and return its size and SHA-256. Raises OSError."""
    found, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(AT_ONCE):
            found.update(block)
            size += len(block)
    return Copied(size=size, sha256=found.hexdigest())


def check_sizes(folder: Path) -> None:
    """Compare the sizes of a copy's files with the manifest. Raises DataError."""
    try:
        for relative, stored in _manifest(folder).files.items():
            size = (folder / FILES / relative).stat().st_size
            if size != stored.size:
                raise DataError(
                    f"{folder / FILES / relative} has {size} bytes, not {stored.size}: "
                    f"{_repair(folder)}"
                )
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}: {_repair(folder)}") from error


def check_contents(source: str, *, progress: bool = True) -> None:
    """If `source` is in a cached copy, read all files of the copy, and compare their SHA-256 with
    the manifest. Raises DataError if they differ."""
    path = user_path(source)
    for inside in (path, *path.parents):
        if inside.name == FILES and (inside.parent / MANIFEST).is_file():
            _check_contents(inside.parent, progress=progress)


def _check_contents(folder: Path, *, progress: bool) -> None:
    files = _manifest(folder).files
    total = sum(stored.size for stored in files.values())
    with (
        meter(f"checking {folder}", total, wanted=progress) as shown,
        ThreadPoolExecutor(cores()) as pool,  # hashing does not hold the GIL
    ):
        paths = [folder / FILES / relative for relative in files]
        try:
            for path, stored, found in zip(
                paths, files.values(), pool.map(copied, paths), strict=True
            ):
                if found != stored:
                    raise DataError(f"{path} changed after the download: {_repair(folder)}")
                shown.advance(stored.size)
        except OSError as error:
            raise DataError(f"{error.filename}: {error.strerror}: {_repair(folder)}") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{path} is damaged: {_repair(folder)}") from error


def _repair(folder: Path) -> str:
    return f"remove {folder} and it is downloaded again"
