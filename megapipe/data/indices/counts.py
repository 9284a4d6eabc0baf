"""How many epochs and samples a number of tokens makes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megapipe.errors import DataError

_SMALL = 0.80
"""A last epoch is shuffled apart if less than this share of its samples is wanted."""


@dataclass(frozen=True)
class EpochCounts:
    """The sizes of the indices.

    Attributes:
        epochs: how often each sequence occurs.
        samples: windows of L tokens and the one that follows, of all epochs together.
        apart: the number of samples before a last epoch that is shuffled by itself; None if all
            epochs are shuffled together.
    """

    epochs: int
    samples: int
    apart: int | None

    @staticmethod
    def of(
        tokens: int, sequence_length: int, wanted: int | None, *, keep_last: bool = False
    ) -> EpochCounts:
        """The counts that Megatron-LM takes.

        A run that needs little of a last epoch would hardly see some documents of it, were it mixed
        with the epochs before: it then comes last.

        Args:
            tokens: of one epoch.
            sequence_length: L.
            wanted: samples that there should be at least; None for those of one epoch.
            keep_last: the tokens that do not fill a last window make a shorter sample. Their number
                is found in single precision, as there; beyond 2^24 tokens it can be one off.

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
