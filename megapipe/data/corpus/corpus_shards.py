"""A corpus in shards of some megabytes. Each shard is read and tokenized by one process.

The content of a shard depends only on the corpus. Files of lines are divided at bytes and parquet
files at row groups; several text files form one shard. Sources that can only be read from their
beginning (compressed files, arrays in JSON, data sets of `datasets`) are read by the process that
hands out the shards; such a shard contains the text.
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
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.corpus.rows import RowParser, TextRows
from megapipe.data.corpus.text_chunks import TextChunk, cut, decoded
from megapipe.errors import DataError

PART = 2**23
"""Minimum bytes of a shard, except the last one of a file or corpus. A shard always ends with a
whole line, row group or file."""
MOST_PARTS = 10000
"""Approximate maximum number of shards of divisible files; a larger corpus gets larger shards."""


T = TypeVar("T")


class CorpusShard(Protocol):
    """Consecutive whole documents of a corpus; may be sent to another process."""

    @property
    def source_bytes(self) -> int:
        """Number of bytes of the corpus on disk that the shard covers; 0 if unknown."""

    def pieces(self, count: RowCount) -> Iterator[TextChunk]:
        """Yield the shard's documents in text chunks, and add the shard's rows to `count`. Raises
        DataError if they cannot be read."""


@dataclass(frozen=True)
class TextFiles:
    """Text files; each file is one document."""

    paths: tuple[Path, ...]
    source_bytes: int
    skip_other_encodings: bool = False
    """Skip files that are not UTF-8, for example test data of the standard library."""

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
    """The lines that begin at bytes start .. stop-1 of a JSONL file."""

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
            # again, with the line's number in the file, which was not known before
            with opened(self.path) as file:
                first = json_rows.line_of(self.path, self._seek(file.content))
            second_reader = self.rows.reader(origin, RowCount())
            for _ in json_rows.of_lines(self._lines(), second_reader, first):
                pass
            raise

    def _seek(self, file: IO[bytes]) -> int:
        """Seek to the first line that begins in the range; return the line's offset."""
        if self.start:
            file.seek(self.start - 1)
            while (end := file.readline(2**20)) and not end.endswith(b"\n"):
                if file.tell() >= self.stop:  # the line belongs to another shard
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
    """Lines of a compressed JSONL file, read by the process that hands out the shards."""

    path: Path
    content: bytes
    first: int
    """Line number of the first line in the file, from 1."""
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
    """Documents that were read by the process that hands out the shards."""

    texts: tuple[str, ...]
    source_bytes: int
    rows: RowParser
    counted: RowCount
    """Counts of the rows from which the documents were made."""

    def pieces(self, count: RowCount) -> Iterator[TextChunk]:
        count.add(self.counted)
        return _pieces(self.texts, self.rows)


def parts(config: DataConfig, rows: RowParser | None = None) -> Iterator[CorpusShard]:
    """Yield the shards of a corpus, in order; an empty corpus has none.

    Args:
        rows: parser that makes documents from rows; default: a parser that takes the text in the
            field ``data.text_field``.

    Raises:
        DataError: the corpus is missing or unreadable, or lacks the rows that `rows` needs.
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
                        f"corpus file {path} has no rows: expected {', '.join(files.OF_ROWS)}"
                    )
                waiting.append(path)
                continue
            yield from chain(_grouped(waiting, size), divide(path, rows, size))
            waiting = []
        yield from _grouped(waiting, size)


def pieces(config: DataConfig, count: RowCount | None = None) -> Iterator[TextChunk]:
    """Yield the text chunks of the whole corpus, read in this process, and count its rows in
    `count`. Lone surrogates are replaced. Raises DataError if the corpus cannot be read."""
    count = count or RowCount()
    for part in parts(config):
        for piece in part.pieces(count):
            yield piece._replace(text=count.replace_surrogates(piece.text))


def total_bytes(config: DataConfig) -> int | None:
    """Return the size of the corpus on disk in bytes; None if unknown."""
    if files.is_standard_library(config.source):
        found = files.standard_library()
    else:
        paths = files.local(config.source)
        if paths is None or config.dataset_split or _is_saved(paths):
            return None
        found = files.corpus_files(paths)
    return sum(map(files.size_of, found))


def is_one_text(config: DataConfig) -> bool:
    """Whether the corpus is a single text file, thus a single document."""
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
    """Return the function that divides a file into shards; its arguments are path, row parser and
    minimum bytes. Return None for a text file: several text files make one shard."""
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
        raise DataError(
            f"corpus file {path}: parquet cannot be read from a compressed file: decompress it"
        )
    for groups, nbytes in _gathered(tables.row_groups(path), size):
        yield RowGroups(path, groups, nbytes, rows)


def _of_stream(
    texts: Iterable[str],
    rows: RowParser,
    count: RowCount,
    bytes_read: Callable[[], int] = lambda: 0,
) -> Iterator[Texts]:
    """Group texts into shards of :data:`PART` characters or more. `count` is increased by the
    reader of `texts`, and reset after each shard. `bytes_read` returns the number of bytes of the
    corpus read so far."""
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
    """Group consecutive items of `sized`, pairs of an item and its number of bytes, until a group
    has `size` bytes. Yield each group and its number of bytes."""
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
