"""Look-up of the files that ``data.source`` means, and what identifies a corpus."""

import contextlib
import glob
import os
import stat
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megapipe.config.data import DataConfig
from megapipe.data.corpus.compressed import SUFFIXES as COMPRESSED
from megapipe.data.corpus.compressed import inner_suffix
from megapipe.errors import DataError
from megapipe.util.hub import is_hub_name
from megapipe.util.paths import user_path

LINES = (".jsonl", ".ndjson")
"""Suffixes of files that have a JSON object in each line."""
OF_ROWS = (*LINES, ".json", ".parquet")
_KNOWN = (*OF_ROWS, ".txt")
_SAVE_TO_DISK_FILES = ("dataset_dict.json", "dataset_info.json")


def is_standard_library(source: str) -> bool:
    return source == "stdlib"


def identity(config: DataConfig) -> list[Any]:
    """Return JSON values that change when the corpus changes; reads no texts.

    A local corpus is identified by the paths, sizes and modification times of files, the standard
    library by Python's version and the names and sizes of files, and a hub data set only by name.

    Raises:
        DataError: the corpus is missing, or its files cannot be examined.
    """
    chosen: list[Any] = [config.source, config.subset, config.dataset_split, config.text_field]
    if is_standard_library(config.source):
        root = Path(sysconfig.get_path("stdlib"))
        names = [[str(p.relative_to(root)), p.stat().st_size] for p in standard_library()]
        return [*chosen, sys.version, names]
    found = local(config.source)
    if found is None:
        return chosen
    files = [file for path in found for file in ([path] if path.is_file() else walk(path))]
    statuses = [(path, status_of(path)) for path in files]
    return [*chosen, [[str(path.resolve()), s.st_size, s.st_mtime_ns] for path, s in statuses]]


def local(source: str) -> list[Path] | None:
    """Return the files and folders of the path or pattern `source`; None for a name on the hub.

    Raises:
        DataError: `source` is missing, or is neither a regular file nor a folder.
    """
    if not source:
        raise DataError(f"corpus {source!r}: expected a file, a folder, a pattern, or a name")
    path = user_path(source)
    if glob.has_magic(source) and not os.path.exists(path):
        found = {Path(name) for name in glob.glob(str(path), recursive=True)}
        matches = sorted(filter(os.path.exists, found), key=lambda match: match.parts)
        if "**" in source:  # the files of a matched folder match as well
            matches = [match for match in matches if not os.path.isdir(match)]
        if not matches:
            raise DataError(f"corpus {source!r}: no file matches (from {Path.cwd()})")
        return [_checked(match, source) for match in matches]
    try:
        return [_checked(path, source)]
    except FileNotFoundError:
        if is_hub_name(source, (*_KNOWN, *COMPRESSED)):
            return None
        raise DataError(f"corpus {source!r}: no such file or folder (from {Path.cwd()})") from None


def check_splits(config: DataConfig, found: list[Path] | None) -> None:
    """Raise DataError if ``data.subset`` or ``data.dataset_split`` is set, but the corpus is not a
    data set that has subsets or splits.

    `found` is the result of :func:`local`.
    """
    if found is None:
        return
    folder = found[0] if len(found) == 1 and found[0].is_dir() else None
    saved = folder is not None and is_saved_data_set(folder)
    if config.dataset_split and folder is None:
        raise DataError(
            f"corpus {config.source!r}: data.dataset_split={config.dataset_split} is for a "
            "data set or its folder, but this is a file: remove data.dataset_split"
        )
    if config.subset and (saved or not config.dataset_split):
        raise DataError(
            f"corpus {config.source!r}: data.subset={config.subset} is for a data set on the "
            "hub, or a folder with data.dataset_split: remove data.subset"
        )


def _checked(path: Path, source: str) -> Path:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"corpus {source!r}: {error.strerror}") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe cannot be read twice
        raise DataError(f"corpus {source!r}: neither a regular file nor a folder")
    return path


def is_saved_data_set(path: Path) -> bool:
    """Whether the folder `path` was written by ``save_to_disk`` of `datasets`."""
    return any(os.path.exists(path / name) for name in _SAVE_TO_DISK_FILES)


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files to read: all named files, and from each named folder the files with known
    suffixes, or all files if no file has a known suffix."""
    found = []
    for path in paths:
        if path.is_file():
            found.append(path)
        else:
            files = walk(path)
            found += [file for file in files if inner_suffix(file) in _KNOWN] or files
    return found


def standard_library() -> list[Path]:
    """Return the standard library's Python files, except installed packages, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = walk(root, skip=("__pycache__", "site-packages", "dist-packages"))
    sources = [path for path in files if path.suffix == ".py"]
    if not sources:
        raise DataError(f"corpus 'stdlib': this Python has no source files in {root}")
    return sources


def walk(folder: Path, skip: tuple[str, ...] = ()) -> list[Path]:
    """Return the files under a folder, sorted by relative path, without hidden files."""

    def refuse(error: OSError) -> None:
        raise DataError(f"corpus folder {error.filename}: {error.strerror}") from error

    files = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        files += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(
        (path for path in files if _is_file(path)), key=lambda path: path.relative_to(folder).parts
    )


def _is_file(path: Path) -> bool:
    """Whether `path` is a regular file or a link to one. Raises DataError if it is unreadable."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISREG(_status(path).st_mode)
    return False


def status_of(path: Path) -> os.stat_result:
    """Return size and times of a file. Raises DataError if the file cannot be examined."""
    try:
        return _status(path)
    except FileNotFoundError as error:
        raise DataError(f"corpus file {path}: {error.strerror}") from error


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"corpus file {path}: {error.strerror}") from error


def size_of(path: Path) -> int:
    """Return the size of a file in bytes. Raises DataError if the file no longer exists."""
    return status_of(path).st_size
