"""Samples of fixed length from a stream of tokens."""

from typing import Any

import numpy as np
import numpy.typing as npt

from megapipe.data.tokens import TokenFile
from megapipe.errors import DataError


class TokenDataset:
    """Cuts the stream of a token file into windows of one input and one label per position.

    Sample i is tokens i*L .. i*L+L (L+1 of them): neighbours share one token, so every token but
    the first of the stream is the label of exactly one position.

    Args:
        file: the stream.
        sequence_length: L.
        keep_last: whether the tokens that do not fill a last window make a shorter sample (held-out
            text is then scored to its last token) or are left out.

    Raises:
        DataError: the stream is too short for a single sample.
    """

    def __init__(self, file: TokenFile, sequence_length: int, *, keep_last: bool = False) -> None:
        self.file = file
        self.sequence_length = sequence_length
        labels = len(file.tokens) - 1
        self._samples = -(-labels // sequence_length) if keep_last else labels // sequence_length
        if self._samples == 0:
            needed = 2 if keep_last else sequence_length + 1
            raise DataError(
                f"{file.path} has {labels + 1} tokens, but one sample needs {needed} "
                f"(train.sequence_length={sequence_length}): use more text"
                + ("" if keep_last else " or shorter sequences")
            )

    def __len__(self) -> int:
        return self._samples

    def sample(self, index: int) -> npt.NDArray[np.int64]:
        """Window `index` [L+1]; only the last one of `keep_last` may be shorter, but has 2 or more.

        Raises:
            IndexError: index is not in 0 .. len-1.
        """
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        start = index * self.sequence_length
        window: npt.NDArray[Any] = self.file.tokens[start : start + self.sequence_length + 1]
        return window.astype(np.int64)
