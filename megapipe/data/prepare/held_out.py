"""Division of a corpus's documents into a training part and a held-out part."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.config.data import DataConfig
from megapipe.data.corpus import TextChunk, is_one_text, pieces
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.order import splitmix64
from megapipe.data.prepare.encode import encode, read_summary, summary_file
from megapipe.data.prepare.parts_folder import CorpusShardFolder, unigram_entropy
from megapipe.data.prepare.progress import Meter, meter
from megapipe.data.prepare.remote_cache import check_contents
from megapipe.data.prepare.sizes import CorpusSizes, sizes_of
from megapipe.data.tokens import TokenWriter
from megapipe.data.tokens.format import token_type
from megapipe.data.tokens.join import DocumentFilter, join
from megapipe.errors import DataError


class Divided(NamedTuple):
    """Sizes of the training part and the held-out part (None: nothing is held out), unigram entropy
    of all tokens in nats per token, and counts of the corpus's rows."""

    train: CorpusSizes
    validation: CorpusSizes | None
    entropy: float
    rows: RowCount


def divide(parts: CorpusShardFolder, folder: Path, *, progress: bool) -> Divided:
    """Tokenize a corpus, and write the token files ``train`` and ``validation`` into `folder`.

    A fraction of the documents, chosen by a hash of a document's number, is held out; each part has
    at least one document. If the corpus is a single document, the end of the document is held out.
    With a fraction of 0 nothing is held out.

    Raises:
        DataError: the corpus cannot be read, is empty, or is too small to divide (a single
            character, or a single row that is not text).
        OSError: a folder cannot be written.
    """
    check_contents(parts.config.source, progress=progress)
    if parts.rows is None and is_one_text(parts.config):
        return _divide_document(parts, folder, RowCount(), progress=progress)
    whole = parts.fill(progress=progress)
    if whole.documents == 1 and parts.rows is None:
        return _divide_document(parts, folder, whole.rows, progress=progress)
    prefixes = parts.prefixes(whole)
    fraction, vocab_size = parts.config.validation_fraction, parts.tokenizer.vocab_size

    def write(name: str, choice: DocumentFilter | None, text_bytes: int) -> CorpusSizes:
        with TokenWriter(folder / name, token_type(vocab_size), vocab_size) as writer:
            join(prefixes, writer, choice)
        return sizes_of(folder / name, text_bytes)

    if whole.documents == 1 and fraction:
        raise DataError(
            f"corpus {parts.config.source!r} has a single row: nothing to hold out; expected "
            "data.validation, or data.validation_fraction=0"
        )
    if not fraction:
        train = write("train", None, whole.text_bytes)
        return Divided(train, None, whole.entropy, whole.rows)
    held_out = HeldOut(fraction, whole.documents)
    held_bytes = first = 0
    for prefix in prefixes:
        text_bytes = read_summary(prefix).text_bytes
        last = first + len(text_bytes)
        held_bytes += int(text_bytes[held_out(first, last)].sum())
        first = last
    return Divided(
        write("train", lambda first, last: ~held_out(first, last), whole.text_bytes - held_bytes),
        write("validation", held_out, held_bytes),
        whole.entropy,
        whole.rows,
    )


class HeldOut:
    """Function that chooses which of `documents` documents, at least 2, are held out: about the
    fraction `fraction`, at least one, and not all."""

    def __init__(self, fraction: float, documents: int) -> None:
        self._below = np.uint64(math.ceil(fraction * 2**64))
        self._last = documents - 1
        self._of_last: bool | None = None
        sides = set()
        for first in range(0, self._last, 2**20):
            sides |= set(self._hashed(first, min(first + 2**20, self._last)).tolist())
            if len(sides) == 2:
                return
        self._of_last = not sides.pop()

    def __call__(self, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Return whether each of the documents first .. last-1 is held out, [last - first]."""
        chosen = self._hashed(first, last)
        if self._of_last is not None and first <= self._last < last:
            chosen[self._last - first] = self._of_last
        return chosen

    def _hashed(self, first: int, last: int) -> npt.NDArray[np.bool_]:
        return splitmix64(np.arange(first, last, dtype=np.uint64)) < self._below


@dataclass(frozen=True)
class _Share:
    """Characters start .. stop-1 of a corpus that is one document."""

    config: DataConfig
    start: int
    stop: int
    shown: Meter
    source_bytes = 0

    def pieces(self, count: RowCount) -> Iterator[TextChunk]:
        at = 0
        for piece in pieces(self.config):
            inside = piece.text[max(self.start - at, 0) : max(self.stop - at, 0)]
            at += len(piece.text)
            if inside:
                self.shown.advance(len(inside))
                yield TextChunk(inside, ends=at >= self.stop)


def _divide_document(
    parts: CorpusShardFolder, folder: Path, rows: RowCount, *, progress: bool
) -> Divided:
    config, tokenizer = parts.config, parts.tokenizer
    length = sum(len(piece.text) for piece in pieces(config))
    if not length:
        raise rows.no_text(config.source, config.text_field)
    if length == 1 and config.validation_fraction:
        raise DataError(f"corpus {config.source!r} has a single character: nothing to hold out")
    cut = length
    if config.validation_fraction:
        cut = min(max(round(length * (1 - config.validation_fraction)), 1), length - 1)
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    with meter(f"tokenizing {config.source}", length, wanted=progress) as shown:

        def write(name: str, start: int, stop: int) -> CorpusSizes:
            summary = encode(_Share(config, start, stop, shown), tokenizer, folder / name)
            summary_file(folder / name).unlink()
            counts[summary.ids] += summary.counts
            return sizes_of(folder / name, int(summary.text_bytes.sum()))

        train = write("train", 0, cut)
        validation = write("validation", cut, length) if cut < length else None
    return Divided(train, validation, unigram_entropy(counts), rows)
