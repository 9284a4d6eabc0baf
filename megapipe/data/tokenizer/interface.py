"""What the package needs of a tokenizer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """The interface of a tokenizer, as far as the package uses it."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1."""

    @property
    def eod(self) -> int:
        """The id that ends a document; no text encodes to it."""

    @property
    def digest(self) -> str:
        """Hex digest of all that decides which ids a text gets."""

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Ids of tokens by names such as ``<|im_end|>``, beside those that texts are made of."""

    def encode(self, text: str) -> TokenIds:
        """Ids of a text [n], without marks at its ends."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """`encode` of each text; may use several threads."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of some ids; special tokens and incomplete characters do not make it fail."""
