"""A folder with the tokenized shards of a corpus; it outlives the process that fills it."""

import contextlib
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.config.data import DataConfig
from megapipe.data.corpus import CorpusShard, RowParser, parts, total_bytes
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.prepare.encode import Summary, prefix_of
from megapipe.data.prepare.progress import meter
from megapipe.data.prepare.workers import encode_all
from megapipe.data.tokenizer import Encoder
from megapipe.errors import DataError
from megapipe.util.no_symlinks import refuse_links


class CorpusTotals(NamedTuple):
    """Totals of a corpus after all its shards are tokenized. `parts` is the number of shards."""

    parts: int
    documents: int
    text_bytes: int
    """Size of the documents in bytes, as UTF-8."""
    entropy: float
    """Unigram entropy, in nats per token."""
    rows: RowCount
    """Counts of the rows read, and of rows without text."""


class CorpusShardFolder:
    """Folder with the tokenized shards of the corpus of `config`. The name of `folder` must
    identify the corpus, `tokenizer` and the row parser `rows` (default: a parser that takes the
    text in the field ``data.text_field``)."""

    def __init__(
        self, folder: Path, config: DataConfig, tokenizer: Encoder, rows: RowParser | None = None
    ) -> None:
        self.folder = folder
        self.config = config
        self.tokenizer = tokenizer
        self.rows = rows

    def fill(self, *, progress: bool) -> CorpusTotals:
        """Tokenize the missing shards, and return the totals of all. After a failure finished
        shards stay.

        Raises:
            DataError: the corpus is empty or cannot be read.
            OSError: the folder cannot be written, or has symbolic links.
        """
        counts = np.zeros(self.tokenizer.vocab_size, np.int64)
        documents = text_bytes = 0
        rows = RowCount()
        refuse_links(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            total = total_bytes(self.config)
            with meter(f"tokenizing {self.config.source}", total, wanted=progress) as shown:

                def step(part: CorpusShard, summary: Summary, was_done: bool) -> None:
                    nonlocal documents, text_bytes
                    its_bytes = int(summary.text_bytes.sum())
                    counts[summary.ids] += summary.counts
                    documents += len(summary.text_bytes)
                    text_bytes += its_bytes
                    rows.add(summary.rows)
                    read = its_bytes if total is None else part.source_bytes
                    shown.advance(read, len(summary.text_bytes), done_before=was_done)

                found = parts(self.config, self.rows)
                number = encode_all(
                    found, self.tokenizer, self.folder, self.config.tokenizer_workers, step
                )
            if not documents:
                self.remove()
                raise rows.no_text(self.config.source, self.config.text_field)
        finally:
            with contextlib.suppress(OSError):  # it is not empty
                self.folder.rmdir()
        return CorpusTotals(number, documents, text_bytes, unigram_entropy(counts), rows)

    def has_changed(self) -> DataError:
        return DataError(
            f"corpus {self.config.source!r} changed while it was tokenized: restart when it "
            "is complete"
        )

    def prefixes(self, whole: CorpusTotals) -> list[Path]:
        """Return the prefixes of all shards' files, in the order of the corpus."""
        return [prefix_of(self.folder, number) for number in range(whole.parts)]

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return the entropy, in nats, of the distribution of tokens with these counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
