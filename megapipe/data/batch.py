"""Rows of token and label tensors for given sample numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from megapipe.data.dataset import Dataset, Sample
from megapipe.data.mixture import Draw
from megapipe.errors import DataError

Order = Callable[[int], int | None]
"""The sample that is drawn at a number, counted from 0; None: there are no more."""


class Mixing(Protocol):
    """The source of each sample of a run, of several."""

    def __call__(self, sample: int) -> Draw:
        """Source and number there of a sample. Raises DataError where there are no more."""

    def taken(self, samples: int) -> list[int]:
        """Samples of each source among the first `samples` of the run."""


@dataclass(frozen=True)
class Source:
    """A data set, and the order in which its samples are drawn."""

    dataset: Dataset
    sample_at: Order
    name: str = ""
    """Given where there are several."""


class Origin(NamedTuple):
    """The place of a row in the data."""

    source: str
    sample: int


class Samples(NamedTuple):
    """b samples of s positions."""

    tokens: torch.Tensor
    """[b, s] int64."""
    labels: torch.Tensor
    """[b, s] int64."""
    mask: torch.Tensor
    """[b, s]: what counts in the loss, bool; of several sources uint8, 0 or 1 + the source."""
    documents: torch.Tensor | None = None
    """[b, s] int64: number of the document of each token in its row, where several are packed."""


class Batches:
    """Turns global sample numbers into tensors; holds no position, so a resume needs no state.

    Args:
        sources: where the samples come from.
        mixture: which source each is from, where there are several.
        vocab_size: token ids must be below it.
        mask_document_ends: leave the prediction of `eod` out of the loss.
        eod: the id that ends a document; also fills what is masked. A number beyond the last sample
            gives a masked row, which fills up a short last batch.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        mixture: Mixing | None = None,
        *,
        vocab_size: int,
        mask_document_ends: bool,
        eod: int,
    ) -> None:
        assert mixture is not None or len(sources) == 1
        self.sources = sources
        self.mixture = mixture
        self.vocab_size = vocab_size
        self.mask_document_ends = mask_document_ends
        self.eod = eod
        self._length = sources[0].dataset.sequence_length

    def __len__(self) -> int:
        """Samples of all sources, each once."""
        return sum(len(source.dataset) for source in self.sources)

    @property
    def names(self) -> list[str]:
        """Of the sources of a mixture; none where there is but one."""
        return [source.name for source in self.sources] if self.mixture is not None else []

    def taken(self, samples: int) -> list[int]:
        """Of the first `samples` samples of a mixture, those of each source."""
        return [] if self.mixture is None else self.mixture.taken(samples)

    def origin(self, number: int) -> Origin | None:
        """Where a sample of the run is from; None: there is no such sample."""
        source, sample = self._find(number)
        return None if sample is None else Origin(self.sources[source].name, sample)

    def rows(self, global_indices: Sequence[int]) -> Samples:
        """Input tokens, labels and the mask of what counts in the loss, for b sample numbers.

        Raises:
            DataError: a token id is outside the vocabulary, or the mixture is used up.
        """
        shape = len(global_indices), self._length
        tokens, labels = (np.full(shape, self.eod, dtype=np.int64) for _ in range(2))
        mask = np.zeros(shape, dtype=np.bool_)
        groups = np.ones((shape[0], 1), dtype=np.uint8)
        documents: npt.NDArray[np.int64] | None = None
        for row, number in enumerate(global_indices):
            source, index = self._find(number)
            if index is None:
                continue
            groups[row] = 1 + source
            dataset = self.sources[source].dataset
            sample = dataset.labelled(index)
            self._check(dataset, sample, index)
            tokens[row, : len(sample.tokens)] = sample.tokens
            labels[row, : len(sample.labels)][sample.mask] = sample.labels[sample.mask]
            mask[row, : len(sample.mask)] = sample.mask
            if sample.documents is not None:
                documents = np.zeros(shape, dtype=np.int64) if documents is None else documents
                documents[row] = sample.documents
        if self.mask_document_ends:
            mask &= labels != self.eod
        counted = mask if self.mixture is None else mask * groups
        found = Samples(*map(torch.from_numpy, (tokens, labels, counted)))
        return found if documents is None else found._replace(documents=torch.from_numpy(documents))

    def _find(self, number: int) -> tuple[int, int | None]:
        """Source and sample of a number of the run."""
        source, draw = (0, number) if self.mixture is None else self.mixture(number)
        return source, self.sources[source].sample_at(draw)

    def _check(self, dataset: Dataset, sample: Sample, index: int) -> None:
        for ids, label in ((sample.tokens, False), (sample.labels, True)):
            wrong = (ids < 0) | (ids >= self.vocab_size)
            if label:
                wrong &= sample.mask
            if wrong.any():
                at = int(wrong.argmax())
                raise DataError(
                    f"token id {ids[at]} at {dataset.place(index, at, label=label)} is "
                    f"outside the vocabulary (0 to {self.vocab_size - 1})"
                )
