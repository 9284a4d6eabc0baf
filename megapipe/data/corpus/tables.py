"""Texts of tables: parquet files by pyarrow, saved and hub data sets by `datasets`, streaming."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megapipe.data.hub import check_reachable, one_line
from megapipe.data_config import DataConfig
from megapipe.errors import DataError

_ROWS = 256
"""Rows that are held as Python strings at a time."""


@contextmanager
def reading(origin: str) -> Iterator[None]:
    """Whatever a reader raises comes out as a DataError that names what was read."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise DataError(f"{origin}: cannot be read ({cause})") from error


def row_groups(path: Path) -> list[tuple[int, int]]:
    """Number of each row group of a parquet file that has rows, and its bytes on disk."""
    import pyarrow.parquet as pq

    with reading(f"corpus file {path}"):
        path.open("rb").close()  # raises the system's error
        metadata = pq.read_metadata(path)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        return [
            (i, sum(group.column(j).total_compressed_size for j in range(group.num_columns)))
            for i, group in enumerate(groups)
            if group.num_rows
        ]


def of_row_groups(path: Path, groups: Sequence[int], field: str) -> Iterator[str]:
    """The texts of some row groups of a parquet file."""
    import pyarrow.parquet as pq

    origin = f"corpus file {path}"
    with reading(origin), pq.ParquetFile(path) as file:
        _check(origin, field, file.schema_arrow)
        for batch in file.iter_batches(_ROWS, row_groups=groups, columns=[field]):
            yield from _texts(batch.column(0))


def of_saved(path: Path, config: DataConfig) -> Iterator[str]:
    """The texts of a folder that `datasets` has saved."""

    def load() -> Any:
        saved = _library().load_from_disk(str(path))
        if not isinstance(saved, dict):
            saved = {str(saved.split or "train"): saved}
            if config.dataset_split is None:
                return next(iter(saved.values()))
        return _split_of(saved, config, path)

    return _rows(f"corpus {path}", config.text_field, load)


def of_data_set(config: DataConfig) -> Iterator[str]:
    """The texts of a data set that `datasets` opens: on the hub, or in a folder as on the hub."""
    local = Path(config.source).expanduser()
    if local.exists():
        name = str(local)
    else:
        name = config.source
        check_reachable("corpus", name, "dataset")

    def load() -> Any:
        opened = _library().load_dataset(
            name, config.subset, streaming=True, cache_dir=str(Path(config.cache, "datasets"))
        )
        return _split_of(opened, config, name)

    return _rows(f"corpus {config.source!r}", config.text_field, load)


def _split_of(splits: Any, config: DataConfig, name: object) -> Any:
    wanted = config.dataset_split or "train"
    if wanted not in splits:
        raise DataError(
            f"corpus {name}: no split {wanted!r} (data.dataset_split); it has: {', '.join(splits)}"
        )
    return splits[wanted]


def _rows(origin: str, field: str, load: Callable[[], Any]) -> Iterator[str]:
    """The texts in `field` of the data set that `load` opens."""
    with reading(origin):
        for table in load().with_format("arrow").iter(batch_size=_ROWS):
            _check(origin, field, table.schema)
            yield from _texts(table.column(field))


def _check(origin: str, field: str, schema: Any) -> None:
    """Raise a DataError if a table has no text of that name."""
    if field not in schema.names:
        raise DataError(
            f"{origin}: no field {field!r} (data.text_field); it has: {', '.join(schema.names)}"
        )
    from pyarrow import types

    kind = schema.field(field).type
    stored = kind.value_type if types.is_dictionary(kind) else kind
    texts = types.is_string, types.is_large_string, types.is_string_view, types.is_null
    if not any(check(stored) for check in texts):
        raise DataError(f"{origin}: field {field!r} (data.text_field) holds {kind}, no text")


def _texts(column: Any) -> Iterator[str]:
    return (text for text in column.to_pylist() if text is not None)


def _library() -> Any:
    """The module `datasets`, with its own logging and progress bars switched off."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    return datasets
