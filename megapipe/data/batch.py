"""Token and label tensors of samples, looked up by the samples' numbers in the run."""

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
from megapipe.text import count_noun

Order = Callable[[int], int | None]
"""Function that maps a draw (a sample's position in the sequence of all samples taken from a data
set) to the index of the sample in the data set; None after the last sample."""


class Mixing(Protocol):
    """Assigns a source to each sample of a run with several sources."""

    def __call__(self, sample: int) -> Draw:
        """Return source and draw of sample number `sample` of the run. Raises DataError if the
        sources are used up."""

    def taken(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples of the run come from each source."""


@dataclass(frozen=True)
class SampleSource:
    """A data set, and the order in which samples are drawn from it."""

    dataset: Dataset
    sample_at: Order
    name: str = ""
    """Name of the source; "" for a single source."""


class Origin(NamedTuple):
    """Where a sample of the run comes from."""

    source: str
    """Name of the source."""
    draw: int
    """Number of earlier samples of the same source, over all epochs."""
    sample: int
    """Index of the sample in the source's data set."""


class Samples(NamedTuple):
    """Tensors of a batch of b samples of s positions."""

    tokens: torch.Tensor
    """Token ids, [b, s] int64."""
    labels: torch.Tensor
    """Labels, [b, s] int64."""
    mask: torch.Tensor
    """Which labels count in the loss, [b, s] bool. With several sources [b, s] uint8: 0 if the
    label does not count, else 1 + the index of the source."""
    documents: torch.Tensor | None = None
    """Index of each token's document in its sample, [b, s] int64; None for samples not packed."""


class Batches:
    """Makes the tensors of a batch, given the numbers of its samples in the run.

    This object has no state that a resume must restore. A number beyond the last sample gives a
    sample without loss, which fills up a short last batch.

    Args:
        sources: the data sets that samples are drawn from.
        mixture: the source of each sample, if there are several sources.
        order: description of the order of samples; a checkpoint stores it for resumed runs.
        vocab_size: upper limit of token ids, exclusive.
        mask_document_ends: whether the prediction of `eod` is left out of the loss.
        eod: id of the end-of-document (EOS) token, which also fills masked positions.
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
        """Return the number of samples of all sources, each counted once."""
        return sum(len(source.dataset) for source in self.sources)

    @property
    def names(self) -> list[str]:
        """Names of the sources of a mixture; [] for a single source."""
        return [source.name for source in self.sources] if self.mixture is not None else []

    def notes(self) -> Iterator[str]:
        """Yield a line for each source whose samples have padding."""
        for source in self.sources:
            if isinstance(source.dataset, PackedDataset):
                name = f"{source.name}: " if source.name else ""
                samples = count_noun(len(source.dataset), "sample")
                yield (
                    f"packed {name}{samples}, of whose positions "
                    f"{source.dataset.padded:.2%} are padding"
                )

    def taken(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples of the run come from each source; []
        without a mixture."""
        return [] if self.mixture is None else self.mixture.taken(samples)

    def origin(self, number: int) -> Origin | None:
        """Return where sample `number` of the run comes from; None if it does not exist."""
        source, draw = self._draw(number)
        sample = self.sources[source].sample_at(draw)
        return None if sample is None else Origin(self.sources[source].name, draw, sample)

    def rows(self, global_indices: Sequence[int]) -> Samples:
        """Return the tensors of the samples whose numbers in the run are `global_indices` [b].

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
        """Return the source of sample `number` of the run, and the draw in that source."""
        return Draw(0, number) if self.mixture is None else self.mixture(number)

    def _check(self, dataset: Dataset, sample: Sample, index: int) -> None:
        for ids, label in ((sample.tokens, False), (sample.labels, True)):
            if ids.view(np.uint64).max() < self.vocab_size:  # unsigned, ids below 0 are largest
                continue
            wrong = (ids < 0) | (ids >= self.vocab_size)
            if label:
                wrong &= sample.mask
            if wrong.any():
                at = int(wrong.argmax())
                raise DataError(
                    f"token id {ids[at]} at {dataset.describe_position(index, at, label=label)} is "
                    f"outside the vocabulary (0 to {self.vocab_size - 1})"
                )
