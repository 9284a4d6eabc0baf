"""Rows of token and label tensors for given sample numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from megapipe.data.dataset import Dataset, Sample
from megapipe.data.mixture import Draw
from megapipe.data.packing import PackedDataset
from megapipe.errors import DataError
from megapipe.words import count_noun

Order = Callable[[int], int | None]
"""The sample that is drawn at a number, counted from 0; None: there are no more."""


class Mixing(Protocol):
    """The source of each sample of a run, of several."""

    def __call__(self, sample: int) -> Draw:
        """Source and number there of a sample. Raises DataError where there are no more."""

    def taken(self, samples: int) -> list[int]:
        """Samples of each source among the first `samples` of the run."""


@dataclass(frozen=True)
class SampleSource:
    """A data set, and the order in which its samples are drawn."""

    dataset: Dataset
    sample_at: Order
    name: str = ""
    """Given where there are several."""


class Origin(NamedTuple):
    """The place of a row in the data."""

    source: str
    draw: int
    """Samples of the source that came before, over all epochs."""
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
        order: what a checkpoint keeps, for the rest of the run to be dealt alike.
        vocab_size: token ids must be below it.
        mask_document_ends: leave the prediction of `eod` out of the loss.
        eod: the id that ends a document; also fills what is masked. A number beyond the last sample
            gives a masked row, which fills up a short last batch.
    """

    def __init__(
        self,
        sources: Sequence[SampleSource],
        mixture: Mixing | None = None,
        *,
        order: str = "",
        vocab_size: int,
        mask_document_ends: bool,
        eod: int,
    ) -> None:
        assert mixture is not None or len(sources) == 1
        self.sources = sources
        self.mixture = mixture
        self.order = order
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

    def notes(self) -> Iterator[str]:
        """A line for each source whose samples have padding."""
        for source in self.sources:
            if isinstance(source.dataset, PackedDataset):
                name = f"{source.name}: " if source.name else ""
                samples = count_noun(len(source.dataset), "sample")
                yield (
                    f"packed {name}{samples}, of whose positions "
                    f"{source.dataset.padded:.2%} are padding"
                )

    def taken(self, samples: int) -> list[int]:
        """Of the first `samples` samples of a mixture, those of each source."""
        return [] if self.mixture is None else self.mixture.taken(samples)

    def origin(self, number: int) -> Origin | None:
        """Where a sample of the run is from; None: there is no such sample."""
        source, draw = self._draw(number)
        sample = self.sources[source].sample_at(draw)
        return None if sample is None else Origin(self.sources[source].name, draw, sample)

    def rows(self, global_indices: Sequence[int]) -> Samples:
        """Input tokens, labels and the mask of what counts in the loss, for b sample numbers.

        Raises:
            DataError: a token id is outside the vocabulary, or the mixture is used up.
        """
        shape = len(global_indices), self._length
        tokens, labels = np.empty(shape, np.int64), np.full(shape, self.eod, np.int64)
        mask = np.zeros(shape, dtype=np.bool_)
        groups = np.ones((shape[0], 1), dtype=np.uint8)
        documents: npt.NDArray[np.int64] | None = None
        for row, number in enumerate(global_indices):
            source, draw = self._draw(number)
            index = self.sources[source].sample_at(draw)
            if index is None:
                tokens[row] = self.eod
                continue
            groups[row] = 1 + source
            dataset = self.sources[source].dataset
            sample = dataset.labelled(index)
            self._check(dataset, sample, index)
            end = len(sample.tokens)
            tokens[row, :end], tokens[row, end:] = sample.tokens, self.eod
            np.copyto(labels[row, : len(sample.labels)], sample.labels, where=sample.mask)
            mask[row, : len(sample.mask)] = sample.mask
            if sample.documents is not None:
                documents = np.zeros(shape, dtype=np.int64) if documents is None else documents
                documents[row] = sample.documents
        if self.mask_document_ends:
            mask &= labels != self.eod
        scored = mask if self.mixture is None else mask * groups
        found = Samples(*map(torch.from_numpy, (tokens, labels, scored)))
        return found if documents is None else found._replace(documents=torch.from_numpy(documents))

    def _draw(self, number: int) -> Draw:
        """Source of a number of the run, and the draw there."""
        return Draw(0, number) if self.mixture is None else self.mixture(number)

    def _check(self, dataset: Dataset, sample: Sample, index: int) -> None:
        for ids, label in ((sample.tokens, False), (sample.labels, True)):
            if ids.view(np.uint64).max() < self.vocab_size:  # as such those below 0 are the largest
                continue
            wrong = (ids < 0) | (ids >= self.vocab_size)
            if label:
                wrong &= sample.mask
            if wrong.any():
                at = int(wrong.argmax())
                raise DataError(
                    f"token id {ids[at]} at {dataset.place(index, at, label=label)} is "
                    f"outside the vocabulary (0 to {self.vocab_size - 1})"
                )
