"""Copies of files on object storage, as they lie in the cache: ``remote-DIGEST``.

The files are in a folder ``files``, beside a manifest with the size and the SHA-256 of each. Sizes
are compared at each start. Of texts the SHA-256 are, before they are tokenized; blocks of a token
file have checksums, which are compared as they are read.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from megapipe.config.section import Section
from megapipe.data.prepare.progress import meter
from megapipe.data.prepare.workers import cores
from megapipe.errors import DataError
from megapipe.util.paths import user_path

FILES, MANIFEST = "files", "manifest.json"
AT_ONCE = 2**22
"""Bytes that are read at a time."""


class Copied(Section):
    """A file of a copy."""

    size: int
    sha256: str


class Manifest(Section):
    """The content of a copy's manifest."""

    source: str
    files: dict[str, Copied]
    """By their names in the folder of files."""


def copied(path: Path) -> Copied:
    """A file as it is. Raises OSError."""
    found, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(AT_ONCE):
            found.update(block)
            size += len(block)
    return Copied(size=size, sha256=found.hexdigest())


def check_sizes(folder: Path) -> None:
    """Compare the sizes of the files of a copy with the manifest's. Raises DataError."""
    try:
        for place, stored in _manifest(folder).files.items():
            size = (folder / FILES / place).stat().st_size
            if size != stored.size:
                raise DataError(
                    f"{folder / FILES / place} has {size} bytes, not {stored.size}: "
                    f"{_repair(folder)}"
                )
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}: {_repair(folder)}") from error


def check_contents(source: str, *, progress: bool = True) -> None:
    """If `source` lies in a copy, read all of its files, and compare their SHA-256 with the
    manifest's. Raises DataError."""
    path = user_path(source)
    for inside in (path, *path.parents):
        if inside.name == FILES and (inside.parent / MANIFEST).is_file():
            _check_contents(inside.parent, progress=progress)


def _check_contents(folder: Path, *, progress: bool) -> None:
    files = _manifest(folder).files
    total = sum(stored.size for stored in files.values())
    with (
        meter(f"checking {folder}", total, wanted=progress) as shown,
        ThreadPoolExecutor(cores()) as pool,  # they hash outside of Python's lock
    ):
        paths = [folder / FILES / place for place in files]
        try:
            for path, stored, found in zip(
                paths, files.values(), pool.map(copied, paths), strict=True
            ):
                if found != stored:
                    raise DataError(f"{path} is not as it was fetched: {_repair(folder)}")
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
    return f"remove {folder} to have it fetched again"
