"""A folder with the parts of a corpus that are tokenized, which outlives the one that fills it."""

import contextlib
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.config import DataConfig
from megapipe.data.corpus import Part, parts, total_bytes
from megapipe.data.prepare.encode import Summary, prefix_of
from megapipe.data.prepare.progress import meter
from megapipe.data.prepare.workers import encode_all
from megapipe.data.tokenizer import Tokenizer
from megapipe.errors import DataError


class Whole(NamedTuple):
    """What is known of a corpus whose parts are there."""

    parts: int
    documents: int
    text_bytes: int
    """Of the documents, as UTF-8."""
    entropy: float
    """Unigram entropy, in nats per token."""


class PartsFolder:
    """The parts of the corpus of `config` in `folder`, which stands for it and for `tokenizer`."""

    def __init__(self, folder: Path, config: DataConfig, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self.config = config
        self.tokenizer = tokenizer

    def fill(self, *, progress: bool) -> Whole:
        """Tokenize what is not there yet.

        Raises:
            DataError: the corpus is empty or cannot be read.
            OSError: the folder cannot be written.
        """
        counts = np.zeros(self.tokenizer.vocab_size, np.int64)
        documents = text_bytes = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with meter(
                f"tokenizing {self.config.source}", total_bytes(self.config), wanted=progress
            ) as shown:

                def step(part: Part, summary: Summary) -> None:
                    nonlocal documents, text_bytes
                    counts[summary.ids] += summary.counts
                    documents += len(summary.text_bytes)
                    text_bytes += int(summary.text_bytes.sum())
                    shown.advance(part.source_bytes, len(summary.text_bytes))

                number = encode_all(
                    parts(self.config), self.tokenizer, self.folder, self.config.workers, step
                )
            if not documents:
                raise self.is_empty()
        except DataError:  # of a corpus that has to be changed
            self.remove()
            raise
        finally:
            with contextlib.suppress(OSError):  # there are parts in it
                self.folder.rmdir()
        return Whole(number, documents, text_bytes, unigram_entropy(counts))

    def is_empty(self) -> DataError:
        return DataError(f"corpus {self.config.source!r} is empty: there is no text in it")

    def prefixes(self, whole: Whole) -> list[Path]:
        """The prefixes of all parts, in the order of the corpus."""
        return [prefix_of(self.folder, number) for number in range(whole.parts)]

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of drawing a token at random from a corpus, given how often each occurs."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
