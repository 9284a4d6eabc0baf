"""Rows of token and label tensors for given sample numbers."""

from collections.abc import Sequence

import numpy as np
import torch

from megapipe.config import Config
from megapipe.data.dataset import Corpus, Dataset, Sample, Split
from megapipe.data.order import order
from megapipe.data.tokenizer import Tokenizer
from megapipe.errors import DataError


class Batches:
    """Turns global sample numbers into tensors; holds no position, so a resume needs no state.

    Args:
        dataset: where the samples come from.
        seed: seed of the order of the samples.
        vocab_size: token ids must be below it.
        mask_document_ends: leave the prediction of `eod` out of the loss.
        eod: the id that ends a document; also fills what is masked.
        shuffle: take the samples in the order of :func:`megapipe.data.order.order`, else in file
            order.
        repeat: start over, in another order, after all samples; else numbers beyond the last
            sample give fully masked rows, which fill up a short last batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        vocab_size: int,
        mask_document_ends: bool,
        eod: int,
        shuffle: bool,
        repeat: bool = True,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.vocab_size = vocab_size
        self.mask_document_ends = mask_document_ends
        self.eod = eod
        self.shuffle = shuffle
        self.repeat = repeat

    def __len__(self) -> int:
        """Samples in the data set."""
        return len(self.dataset)

    def rows(
        self, global_indices: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input tokens, labels and the mask of what counts in the loss, for b sample numbers.

        Returns:
            tokens [b, s] int64, labels [b, s] int64, mask [b, s] bool.

        Raises:
            DataError: a token id is outside the vocabulary.
        """
        shape = len(global_indices), self.dataset.sequence_length
        tokens, labels = (np.full(shape, self.eod, dtype=np.int64) for _ in range(2))
        mask = np.zeros(shape, dtype=np.bool_)
        for row, global_index in enumerate(global_indices):
            index = self._sample_index(global_index)
            if index is None:
                continue
            sample = self.dataset.labelled(index)
            self._check(sample, index)
            tokens[row, : len(sample.tokens)] = sample.tokens
            labels[row, : len(sample.labels)][sample.mask] = sample.labels[sample.mask]
            mask[row, : len(sample.mask)] = sample.mask
        if self.mask_document_ends:
            mask &= labels != self.eod
        return torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(mask)

    def _sample_index(self, global_index: int) -> int | None:
        samples = len(self.dataset)
        if global_index >= samples and not self.repeat:
            return None
        return order(self.seed, samples, global_index) if self.shuffle else global_index % samples

    def _check(self, sample: Sample, index: int) -> None:
        for ids, label in ((sample.tokens, False), (sample.labels, True)):
            wrong = (ids < 0) | (ids >= self.vocab_size)
            if label:
                wrong &= sample.mask
            if wrong.any():
                at = int(wrong.argmax())
                raise DataError(
                    f"token id {ids[at]} at {self.dataset.place(index, at, label=label)} is "
                    f"outside the vocabulary (0 to {self.vocab_size - 1})"
                )


def build_batches(config: Config, tokenizer: Tokenizer, corpus: Corpus) -> tuple[Batches, Batches]:
    """Training and validation batches of a prepared corpus, or of the user's data set.

    Training never ends. Validation has every held-out token as a label once. Its order is shuffled,
    so that its first samples stand for all, and is the same for every `run.seed`.

    Raises:
        DataError: a split is damaged, or too short for one sample.
    """

    def batches(split: Split, *, seed: int, training: bool) -> Batches:
        return Batches(
            corpus.dataset(split, config.train.sequence_length),
            seed=seed,
            vocab_size=config.model.vocab_size or tokenizer.vocab_size,
            mask_document_ends=config.data.mask_document_ends,
            eod=tokenizer.eod,
            shuffle=True,
            repeat=training,
        )

    return (
        batches("train", seed=config.run.seed, training=True),
        batches("validation", seed=0, training=False),
    )
