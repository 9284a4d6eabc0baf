"""A corpus in parts of some megabytes, each of which one process reads and tokenizes.

What is in a part depends on the corpus alone. Files of lines are divided at bytes, parquet files at
row groups, and text files come several to a part. What can only be read from its beginning (packed
files, arrays in JSON, data sets of `datasets`) is read where parts are handed out, and goes with
them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import IO, Protocol, TypeVar

from megapipe.config.data import DataConfig
from megapipe.data.corpus import files, json_rows, tables
from megapipe.data.corpus.compressed import inner_suffix, is_compressed, opened
from megapipe.data.corpus.cutting import TextChunk, cut, decoded
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.corpus.rows import RowParser, TextRows
from megapipe.errors import DataError

PART = 2**23
"""Bytes of a part at least, as far as there are so many and borders of lines, row groups and files
allow."""
MOST_PARTS = 10000
"""Parts at most, about, of files that can be divided; those of larger corpora are larger."""


T = TypeVar("T")


class CorpusShard(Protocol):
    """Whole documents that follow one another in a corpus; may be sent to another process."""

    @property
    def source_bytes(self) -> int:
        """Bytes of the corpus on disk that it stands for; 0 where they are not known."""

    def pieces(self, count: RowCount) -> Iterator[TextChunk]:
        """Its documents; rows without a text are added to `count`. Raises DataError for what cannot
        be read."""


@dataclass(frozen=True)
class TextFiles:
    """Files of text, each of which is one document."""

    paths: tuple[Path, ...]
    source_bytes: int
    skip_other_encodings: bool = False
    """Leave out what is no UTF-8, as test data of the standard library is."""

    def pieces(self, count: RowCount) -> Iterator[TextChunk]:
        for path in self.paths:
            with opened(path) as file:
                try:
                    if self.skip_other_encodings:
                        yield from cut([file.content.read().decode()])
                    else:
                        yield from cut(decoded(file.content))
                except UnicodeDecodeError as error:
                    if not self.skip_other_encodings:
                        raise DataError(
                            f"corpus file {path}: not UTF-8 text (byte 0x{error.object[0]:02x} at "
                            f"offset {error.start})"
                        ) from error


@dataclass(frozen=True)
class LineRange:
    """The lines of a JSONL file that begin at bytes start .. stop-1."""

    path: Path
    start: int
    stop: int
    rows: RowParser

    @property
    def source_bytes(self) -> int:
        return self.stop - self.start

    def pieces(self, count: RowCount) -> Iterator[TextChunk]:
        origin = f"corpus file {self.path}"
        reader = self.rows.reader(origin, count)
        try:
            yield from _pieces(json_rows.of_lines(self._lines(), reader, 1), self.rows)
            if not self.start:
                reader.finish()
        except DataError:
            if not self.start:
                raise
            # once more, with the number of the line in the file, which is not known before
            with opened(self.path) as file:
                first = json_rows.line_of(self.path, self._seek(file.content))
            again = self.rows.reader(origin, RowCount())
            for _ in json_rows.of_lines(self._lines(), again, first):
                pass
            raise

    def _seek(self, file: IO[bytes]) -> int:
        """Go to the first line that begins in the range; its offset."""
        if self.start:
            file.seek(self.start - 1)
            while (end := file.readline(2**20)) and not end.endswith(b"\n"):
                if file.tell() >= self.stop:  # a line that another part has
                    break
        return file.tell()

    def _lines(self) -> Iterator[bytes]:
        with opened(self.path) as file:
            at = self._seek(file.content)
            while at < self.stop and (line := file.content.readline()):
                at += len(line)
                yield line


@dataclass(frozen=True)
class Lines:
    """Lines of a packed JSONL file, read where parts are handed out."""

    path: Path
    content: bytes
    first: int
    """Number of the first line."""
    source_bytes: int
    rows: RowParser

    def pieces(self, count: RowCount) -> Iterator[TextChunk]:
        reader = self.rows.reader(f"corpus file {self.path}", count)
        found = json_rows.of_lines(BytesIO(self.content), reader, self.first)
        yield from _pieces(found, self.rows)
        if self.first == 1:
            reader.finish()


@dataclass(frozen=True)
class RowGroups:
    """Row groups of a parquet file."""

    path: Path
    groups: tuple[int, ...]
    source_bytes: int
    rows: RowParser

    def pieces(self, count: RowCount) -> Iterator[TextChunk]:
        texts = tables.of_row_groups(self.path, self.groups, self.rows, count)
        return _pieces(texts, self.rows)


@dataclass(frozen=True)
class Texts:
    """Documents, read where parts are handed out."""

    texts: tuple[str, ...]
    source_bytes: int
    rows: RowParser
    counted: RowCount
    """Of the rows that were read for them."""

    def pieces(self, count: RowCount) -> Iterator[TextChunk]:
        count.add(self.counted)
        return _pieces(self.texts, self.rows)


def parts(config: DataConfig, rows: RowParser | None = None) -> Iterator[CorpusShard]:
    """The parts of a corpus, in its order; there may be none.

    Args:
        rows: what is taken of rows; by default the text in ``data.text_field``.

    Raises:
        DataError: the corpus is missing or unreadable, or has none of these rows.
    """
    rows = TextRows(config.text_field) if rows is None else rows
    if files.is_standard_library(config.source):
        files.check_splits(config, [])
        yield from _grouped(files.standard_library(), PART, skip_other_encodings=True)
        return
    found, count = files.local(config.source), RowCount()
    files.check_splits(config, found)
    if found is None or (config.dataset_split and not _is_saved(found)):
        yield from _of_stream(tables.of_data_set(config, rows, count), rows, count)
    elif _is_saved(found):
        yield from _of_stream(tables.of_saved(found[0], config, rows, count), rows, count)
    else:
        waiting: list[Path] = []
        size = max(PART, (total_bytes(config) or 0) // MOST_PARTS)
        for path in files.corpus_files(found):
            divide = _divider(path)
            if divide is None:
                if not rows.takes_texts:
                    raise DataError(
                        f"corpus file {path}: it has no rows, as {', '.join(files.OF_ROWS)} have"
                    )
                waiting.append(path)
                continue
            yield from chain(_grouped(waiting, size), divide(path, rows, size))
            waiting = []
        yield from _grouped(waiting, size)


def pieces(config: DataConfig, count: RowCount | None = None) -> Iterator[TextChunk]:
    """Yield the whole corpus, read in this process, and add its rows to `count`. Lone surrogates
    are replaced. Raises as reading its parts does."""
    count = count or RowCount()
    for part in parts(config):
        for piece in part.pieces(count):
            yield piece._replace(text=count.replace_surrogates(piece.text))


def total_bytes(config: DataConfig) -> int | None:
    """Bytes of the corpus on disk; None where they are not known."""
    if files.is_standard_library(config.source):
        found = files.standard_library()
    else:
        paths = files.local(config.source)
        if paths is None or config.dataset_split or _is_saved(paths):
            return None
        found = files.corpus_files(paths)
    return sum(map(files.size_of, found))


def is_one_text(config: DataConfig) -> bool:
    """Whether the corpus is one text file, and so one document."""
    if files.is_standard_library(config.source) or config.dataset_split:
        return False
    found = files.local(config.source)
    if found is None or _is_saved(found):
        return False
    paths = files.corpus_files(found)
    return len(paths) == 1 and _divider(paths[0]) is None


def _is_saved(paths: list[Path]) -> bool:
    return len(paths) == 1 and files.is_saved_data_set(paths[0])


def _divider(path: Path) -> Callable[[Path, RowParser, int], Iterator[CorpusShard]] | None:
    """The function that divides a file, given its rows' reader, into parts of some bytes; None for
    text, of which several files make one part."""
    suffix = inner_suffix(path)
    if suffix in files.LINES:
        return _of_packed_lines if is_compressed(path) else _of_lines
    if suffix == ".json":
        return _of_json
    return _of_parquet if suffix == ".parquet" else None


def _grouped(
    paths: Iterable[Path], size: int, skip_other_encodings: bool = False
) -> Iterator[TextFiles]:
    sized = ((path, files.size_of(path)) for path in paths)
    for group, nbytes in _gathered(sized, size):
        yield TextFiles(group, nbytes, skip_other_encodings)


def _of_lines(path: Path, rows: RowParser, size: int) -> Iterator[LineRange]:
    end = files.size_of(path)
    for start in range(0, end, size):
        yield LineRange(path, start, min(start + size, end), rows)


def _of_packed_lines(path: Path, rows: RowParser, _: int) -> Iterator[Lines]:
    with opened(path) as file:
        first, before = 1, 0
        while content := file.content.read(PART):
            content += file.content.readline()
            at = file.raw.tell()
            yield Lines(path, content, first, at - before, rows)
            first, before = first + content.count(b"\n"), at


def _of_json(path: Path, rows: RowParser, _: int) -> Iterator[Texts]:
    with opened(path) as file:
        count = RowCount()
        texts = json_rows.of_values(file.content, rows.reader(f"corpus file {path}", count))
        yield from _of_stream(texts, rows, count, file.raw.tell)


def _of_parquet(path: Path, rows: RowParser, size: int) -> Iterator[RowGroups]:
    if is_compressed(path):
        raise DataError(f"corpus file {path}: parquet cannot be read from a packed file; unpack it")
    for groups, nbytes in _gathered(tables.row_groups(path), size):
        yield RowGroups(path, groups, nbytes, rows)


def _of_stream(
    texts: Iterable[str],
    rows: RowParser,
    count: RowCount,
    bytes_read: Callable[[], int] = lambda: 0,
) -> Iterator[Texts]:
    """Parts of some characters; `count` has the rows since the last part, and `bytes_read` tells
    how far the corpus was read."""
    waiting: list[str] = []
    size = before = 0

    def part() -> Texts:
        nonlocal waiting, size, before
        at = bytes_read()
        made = Texts(tuple(waiting), at - before, rows, replace(count))
        waiting, size, before = [], 0, at
        vars(count).update(vars(RowCount()))
        return made

    for text in texts:
        waiting.append(text)
        size += len(text)
        if size >= PART:
            yield part()
    if waiting or count.rows:
        yield part()


def _gathered(sized: Iterable[tuple[T, int]], size: int) -> Iterator[tuple[tuple[T, ...], int]]:
    """Things that follow one another, as many as have `size` bytes together, and their bytes."""
    group: list[T] = []
    nbytes = 0
    for thing, its_bytes in sized:
        group.append(thing)
        nbytes += its_bytes
        if nbytes >= size:
            yield tuple(group), nbytes
            group, nbytes = [], 0
    if group:
        yield tuple(group), nbytes


def _pieces(texts: Iterable[str], rows: RowParser) -> Iterator[TextChunk]:
    for text in texts:
        yield from rows.pieces(text)
