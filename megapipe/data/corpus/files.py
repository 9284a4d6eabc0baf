"""The files of a corpus."""

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
from megapipe.data.hub import is_hub_name
from megapipe.errors import DataError
from megapipe.util.paths import user_path

LINES = (".jsonl", ".ndjson")
"""Suffixes of files with a JSON object in each line."""
OF_ROWS = (*LINES, ".json", ".parquet")
_KNOWN = (*OF_ROWS, ".txt")
_MARKS = ("dataset_dict.json", "dataset_info.json")


def is_standard_library(source: str) -> bool:
    return source == "stdlib"


def identity(config: DataConfig) -> list[Any]:
    """A key that changes when the corpus changes, as JSON values, without reading the texts.

    A local corpus is identified by the paths, sizes and modification times of its files, the
    standard library by the version of Python and the names and sizes of its files, a hub data set
    by its name alone.

    Raises:
        DataError: the corpus is missing or unreadable, as far as that is visible without reading.
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
    """The files and folders that `source` names, by a path or by a pattern; None if it is a name
    on the hub.

    Raises:
        DataError: there is nothing of that name, or it is neither a file nor a folder.
    """
    if not source:
        raise DataError(f"corpus {source!r}: expected a file, a folder, a pattern, or a name")
    path = user_path(source)
    if glob.has_magic(source) and not os.path.exists(path):
        found = {Path(name) for name in glob.glob(str(path), recursive=True)}
        matches = sorted(filter(os.path.exists, found), key=lambda match: match.parts)
        if "**" in source:  # its folders' files match as well
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
    """Raise DataError for keys that only a data set has a use for, with a corpus that is none.

    `found` is what :func:`local` has found.
    """
    if found is None:
        return
    folder = found[0] if len(found) == 1 and found[0].is_dir() else None
    saved = folder is not None and is_saved_data_set(folder)
    if config.dataset_split and folder is None:
        raise DataError(
            f"corpus {config.source!r}: data.dataset_split={config.dataset_split} is for a data "
            "set or a folder of one, and this is a file: expected no data.dataset_split"
        )
    if config.subset and (saved or not config.dataset_split):
        raise DataError(
            f"corpus {config.source!r}: data.subset={config.subset} is for a data set of the hub, "
            "or for a folder with data.dataset_split: expected no data.subset"
        )


def _checked(path: Path, source: str) -> Path:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"corpus {source!r}: {error.strerror}") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe has no second reading
        raise DataError(f"corpus {source!r}: neither a regular file nor a folder")
    return path


def is_saved_data_set(path: Path) -> bool:
    """Whether a folder was written by ``save_to_disk`` of `datasets`."""
    return any(os.path.exists(path / mark) for mark in _MARKS)


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """The files to read: those named, and of each folder those with suffixes that are known; where
    there is none of them, all files of the folder."""
    found = []
    for path in paths:
        if path.is_file():
            found.append(path)
        else:
            files = walk(path)
            found += [file for file in files if inner_suffix(file) in _KNOWN] or files
    return found


def standard_library() -> list[Path]:
    """Python files of the standard library, without installed packages, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = walk(root, skip=("__pycache__", "site-packages", "dist-packages"))
    sources = [path for path in files if path.suffix == ".py"]
    if not sources:
        raise DataError(f"corpus 'stdlib': this Python keeps no source files in {root}")
    return sources


def walk(folder: Path, skip: tuple[str, ...] = ()) -> list[Path]:
    """All files under a folder, sorted by their names in it; hidden files and folders left out."""

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
    """Whether it is one; links to nothing are not. Raises DataError if that is not to be seen."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISREG(_status(path).st_mode)
    return False


def status_of(path: Path) -> os.stat_result:
    """Size and times of a file. Raises DataError if they are not to be had."""
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
    """Bytes of a file. Raises DataError if it is gone."""
    return status_of(path).st_size
