"""Documents of a corpus, one text after another, from wherever `data.source` says.

JSONL, JSON, parquet and hub data sets are read by `datasets`, streaming: a corpus is passed over
once, on its way into token files, so no second copy of it is made. Each file is opened by itself,
so that an error names the file.
"""

import os
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megapipe.config import DataConfig
from megapipe.data.hub import check_reachable, is_hub_name, one_line
from megapipe.errors import DataError

_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_SUFFIXES = (*_READERS, ".txt")
_ROWS = 256
"""Rows that are held as Python strings at a time."""


def documents(config: DataConfig) -> Iterator[str]:
    """The texts of the corpus, lazily and always in the same order; empty ones are left out.

    Raises:
        DataError: the corpus is missing, unreadable or empty, a text is no UTF-8, or there is no
            field of text of the given name.
    """
    empty = True
    for text in _texts(config):
        if text:
            empty = False
            yield text
    if empty:
        raise DataError(f"corpus {config.source!r} is empty: there is no text in it")


def identity(config: DataConfig) -> list[Any]:
    """A key that changes when the corpus changes, as JSON values, without reading the texts.

    A local corpus is identified by the paths, sizes and modification times of its files, the
    standard library by the version of Python and the names and sizes of its files, a hub data set
    by its name alone.

    Raises:
        DataError: as `documents`, for what is visible without reading.
    """
    chosen: list[Any] = [config.source, config.subset, config.text_field]
    if config.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        names = [[str(p.relative_to(root)), p.stat().st_size] for p in _stdlib_files()]
        return [*chosen, sys.version, names]
    path = _local_path(config.source)
    if path is None:
        return chosen
    files = [path] if path.is_file() else _walk(path)
    return [
        *chosen,
        [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in files],
    ]


def _texts(config: DataConfig) -> Iterator[str]:
    if config.source == "stdlib":
        yield from _stdlib()
        return
    path = _local_path(config.source)
    if path is None:
        yield from _hub(config)
    elif path.is_file():
        yield from _file(path, config)
    elif any(os.path.exists(path / mark) for mark in ("dataset_dict.json", "dataset_info.json")):
        yield from _saved(path, config)
    else:
        for file in _corpus_files(path):
            yield from _file(file, config)


def _local_path(source: str) -> Path | None:
    """The file or folder that `source` names; None if it is a name on the hub."""
    path = Path(source).expanduser()
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if is_hub_name(source, _SUFFIXES):
            return None
        raise DataError(f"corpus {source!r}: no such file or folder (from {Path.cwd()})") from None
    except OSError as error:
        raise DataError(f"corpus {source!r}: {error.strerror}") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe has no second reading
        raise DataError(f"corpus {source!r}: neither a regular file nor a folder")
    return path


def _stdlib() -> Iterator[str]:
    for path in _stdlib_files():
        try:
            yield _read(path).decode()
        except UnicodeDecodeError:  # test data in other encodings
            continue


def _stdlib_files() -> list[Path]:
    """Python files of the standard library, without installed packages, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = _walk(root, skip=("__pycache__", "site-packages", "dist-packages"))
    sources = [path for path in files if path.suffix == ".py"]
    if not sources:
        raise DataError(f"corpus 'stdlib': this Python keeps no source files in {root}")
    return sources


def _corpus_files(folder: Path) -> list[Path]:
    """Files with the suffixes that are read; where there is none of them, all files, as text."""
    files = _walk(folder)
    return [path for path in files if path.suffix.lower() in _SUFFIXES] or files


def _walk(folder: Path, skip: tuple[str, ...] = ()) -> list[Path]:
    """All files under a folder, sorted by their names in it; hidden files and folders left out."""

    def refuse(error: OSError) -> None:
        raise DataError(f"corpus folder {error.filename}: {error.strerror}") from error

    files = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        files += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(
        (path for path in files if path.is_file()), key=lambda path: path.relative_to(folder).parts
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"corpus file {path}: {error.strerror}") from error


def _file(path: Path, config: DataConfig) -> Iterator[str]:
    kind = _READERS.get(path.suffix.lower())
    if kind is None:
        try:
            yield _read(path).decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"corpus file {path}: not UTF-8 text (byte 0x{error.object[error.start]:02x} at "
                f"offset {error.start})"
            ) from error
        return

    def load() -> Any:
        path.open("rb").close()  # raises the system's error, which the readers hide
        if _has_no_rows(path, kind):
            return None
        return _library().load_dataset(
            kind,
            data_files=[str(path)],
            split="train",
            streaming=True,
            cache_dir=str(Path(config.cache, "datasets")),
        )

    yield from _rows(f"corpus file {path}", config.text_field, load)


def _has_no_rows(path: Path, kind: str) -> bool:
    """Whether a file is validly empty, which the readers of `datasets` reject."""
    if kind == "parquet":
        from pyarrow.parquet import read_metadata  # type: ignore[import-untyped]

        return int(read_metadata(path).num_rows) == 0
    with path.open("rb") as file:
        return not any(line.strip() for line in file)


def _saved(path: Path, config: DataConfig) -> Iterator[str]:
    def load() -> Any:
        saved = _library().load_from_disk(str(path))
        if isinstance(saved, dict):
            if "train" not in saved:
                raise DataError(f"corpus {path}: no split 'train'; it has: {', '.join(saved)}")
            saved = saved["train"]
        return saved

    yield from _rows(f"corpus {path}", config.text_field, load)


def _hub(config: DataConfig) -> Iterator[str]:
    check_reachable("corpus", config.source, "dataset")

    def load() -> Any:
        return _library().load_dataset(
            config.source,
            config.subset,
            split="train",
            streaming=True,
            cache_dir=str(Path(config.cache, "datasets")),
        )

    yield from _rows(f"corpus {config.source!r}", config.text_field, load)


def _rows(origin: str, field: str, load: Callable[[], Any]) -> Iterator[str]:
    """The texts in `field` of the data set that `load` opens (None: it has no rows)."""
    try:
        dataset = load()
        tables = () if dataset is None else dataset.with_format("arrow").iter(batch_size=_ROWS)
        for table in tables:
            yield from _column(origin, field, table)
    except DataError:
        raise
    except Exception as error:  # whatever the reader of this format raises
        cause = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise DataError(f"{origin}: cannot be read ({cause})") from error


def _column(origin: str, field: str, table: Any) -> Iterator[str]:
    from pyarrow import types  # type: ignore[import-untyped]

    if field not in table.column_names:
        raise DataError(
            f"{origin}: no field {field!r} (data.text_field); "
            f"it has: {', '.join(table.column_names)}"
        )
    column = table.column(field)
    if types.is_null(column.type):
        return
    if not (types.is_string(column.type) or types.is_large_string(column.type)):
        raise DataError(f"{origin}: field {field!r} (data.text_field) holds {column.type}, no text")
    yield from (text for text in column.to_pylist() if text is not None)


def _library() -> Any:
    """The module `datasets`, with its own logging and progress bars switched off."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    return datasets
