"""Rows of tables: parquet files by pyarrow, saved and hub data sets by `datasets`, streaming."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megapipe.config.data import DataConfig
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.corpus.rows import RowParser
from megapipe.data.hub import check_reachable
from megapipe.errors import DataError
from megapipe.util.paths import exists, user_path
from megapipe.words import one_line

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


def of_row_groups(
    path: Path, groups: Sequence[int], rows: RowParser, count: RowCount
) -> Iterator[str]:
    """The documents of some row groups of a parquet file, which follow one another."""
    import pyarrow.parquet as pq

    origin = f"corpus file {path}"
    with reading(origin), pq.ParquetFile(path) as file:
        columns = rows.columns(origin, file.schema_arrow)
        row = 1 + sum(file.metadata.row_group(i).num_rows for i in range(groups[0]))
        for batch in file.iter_batches(_ROWS, row_groups=groups, columns=columns):
            yield from rows.of_table(origin, batch.select(columns), row, count)
            row += batch.num_rows


def of_saved(path: Path, config: DataConfig, rows: RowParser, count: RowCount) -> Iterator[str]:
    """The documents of a folder that `datasets` has saved."""

    def load() -> Any:
        saved = _library().load_from_disk(str(path))
        if not isinstance(saved, dict):
            saved = {str(saved.split or "train"): saved}
            if config.dataset_split is None:
                return next(iter(saved.values()))
        return _split_of(saved, config, path)

    return _of_data_set(f"corpus {path}", rows, count, load)


def of_data_set(config: DataConfig, rows: RowParser, count: RowCount) -> Iterator[str]:
    """The documents of a data set that `datasets` opens: on the hub, or a folder as on the hub."""
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
    """The documents of the data set that `load` opens."""
    with reading(origin):
        row = 1
        for table in load().with_format("arrow").iter(batch_size=_ROWS):
            columns = rows.columns(origin, table.schema)
            yield from rows.of_table(origin, table.select(columns), row, count)
            row += table.num_rows


def _library() -> Any:
    """The module `datasets`, with its own logging and progress bars switched off."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    return datasets
