"""Rows of tables, streamed: parquet files with pyarrow, saved and hub data sets with `datasets`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megapipe.config.data import DataConfig
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.corpus.rows import RowParser
from megapipe.errors import DataError
from megapipe.text import one_line
from megapipe.util.hub import check_reachable
from megapipe.util.paths import exists, user_path

_ROWS = 256
"""Number of rows that are Python strings in memory at a time."""


@contextmanager
def reading(origin: str) -> Iterator[None]:
    """Turn an exception of a reader into a DataError that names the file or data set."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise DataError(f"{origin} cannot be read ({cause})") from error


def row_groups(path: Path) -> list[tuple[int, int]]:
    """Return index and bytes on disk of each non-empty row group of a parquet file."""
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


def of_row_groups(
    path: Path, groups: Sequence[int], rows: RowParser, count: RowCount
) -> Iterator[str]:
    """Yield the documents of consecutive row groups of a parquet file."""
    import pyarrow.parquet as pq

    origin = f"corpus file {path}"
    with reading(origin), pq.ParquetFile(path) as file:
        columns = rows.columns(origin, file.schema_arrow)
        row = 1 + sum(file.metadata.row_group(i).num_rows for i in range(groups[0]))
        for batch in file.iter_batches(_ROWS, row_groups=groups, columns=columns):
            yield from rows.of_table(origin, batch.select(columns), row, count)
            row += batch.num_rows


def of_saved(path: Path, config: DataConfig, rows: RowParser, count: RowCount) -> Iterator[str]:
    """Yield the documents of a data set that `datasets` has saved in the folder `path`."""

    def load() -> Any:
        saved = _library().load_from_disk(str(path))
        if not isinstance(saved, dict):
            saved = {str(saved.split or "train"): saved}
            if config.dataset_split is None:
                return next(iter(saved.values()))
        return _split_of(saved, config, path)

    return _of_data_set(f"corpus {path}", rows, count, load)


def of_data_set(config: DataConfig, rows: RowParser, count: RowCount) -> Iterator[str]:
    """Yield the documents of a data set that `datasets` opens: on the hub, or a local folder."""
    local = user_path(config.source)
    if exists(local):
        name = str(local)
    else:
        name = config.source
        check_reachable("corpus", name, "dataset")

    def load() -> Any:
        opened = _library().load_dataset(
            name, config.subset, streaming=True, cache_dir=str(Path(config.cache, "datasets"))
        )
        return _split_of(opened, config, name)

    return _of_data_set(f"corpus {config.source!r}", rows, count, load)


def _split_of(splits: Any, config: DataConfig, name: object) -> Any:
    wanted = config.dataset_split or "train"
    if wanted not in splits:
        raise DataError(
            f"corpus {name}: no split {wanted!r} (data.dataset_split); it has: {', '.join(splits)}"
        )
    return splits[wanted]


def _of_data_set(
    origin: str, rows: RowParser, count: RowCount, load: Callable[[], Any]
) -> Iterator[str]:
    """Yield the documents of the data set that `load` opens."""
    with reading(origin):
        row = 1
        for table in load().with_format("arrow").iter(batch_size=_ROWS):
            columns = rows.columns(origin, table.schema)
            yield from rows.of_table(origin, table.select(columns), row, count)
            row += table.num_rows


def _library() -> Any:
    """Return the module `datasets`, with its logging and progress bars switched off."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    return datasets
