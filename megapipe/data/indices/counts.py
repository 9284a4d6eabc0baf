"""Numbers of epochs and samples of a token file, computed as in Megatron-LM."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megapipe.errors import DataError

_SMALL = 0.80
"""Fraction of the last epoch. If a run needs less of it, that epoch is shuffled separately."""


@dataclass(frozen=True)
class EpochCounts:
    """Numbers of epochs and samples, which are the sizes of Megatron-LM's index arrays.

    Attributes:
        epochs: how often each sequence occurs.
        samples: number of windows of L + 1 tokens in all epochs; neighbours share one token.
        apart: number of samples before the last epoch, if that epoch is shuffled separately; None
            if all epochs are shuffled together.
    """

    epochs: int
    samples: int
    apart: int | None

    @staticmethod
    def of(
        tokens: int, sequence_length: int, wanted: int | None, *, keep_last: bool = False
    ) -> EpochCounts:
        """Return the counts that Megatron-LM computes.

        If a run needs only a few samples of the last epoch, the last epoch is not mixed with
        earlier epochs but comes after them.

        Args:
            tokens: number of tokens of one epoch.
            sequence_length: L.
            wanted: minimum number of samples; None: the samples of one epoch.
            keep_last: whether tokens that do not fill a last window make a shorter sample. The
                number of samples is then computed in fp32, as in Megatron-LM; beyond 2^24 tokens it
                can be one off.

        Raises:
            DataError: there are too few tokens for a sample.
        """
        if tokens < 2 or (wanted is None and tokens <= sequence_length and not keep_last):
            raise DataError(
                f"{tokens} tokens, but a sample needs {2 if keep_last else sequence_length + 1} "
                f"(train.sequence_length={sequence_length}): use more text or shorter sequences"
            )
        epochs = 1 if wanted is None else max(1, -(-(wanted * sequence_length + 1) // tokens))
        labels = epochs * tokens - 1
        samples = labels // sequence_length
        if keep_last:
            samples = math.ceil(np.float32(labels) / np.float32(sequence_length))
        apart = None
        if wanted is not None and epochs > 1:
            before = ((epochs - 1) * tokens - 1) // sequence_length
            if wanted - before < int(_SMALL * ((tokens - 1) // sequence_length)):
                apart = before
        return EpochCounts(epochs, samples, apart)
