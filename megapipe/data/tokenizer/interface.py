"""The interface that a tokenizer has to have."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.integer[Any]]


class TokenOffsets(NamedTuple):
    """Tokens of a text, and the characters that each stands for."""

    ids: TokenIds
    """[n]."""
    starts: npt.NDArray[np.int64]
    """[n]."""
    stops: npt.NDArray[np.int64]
    """[n], behind the last one."""


@dataclass(frozen=True)
class Chat:
    """How a tokenizer writes conversations."""

    template: str | None = None
    """In Jinja, as `transformers` renders it."""
    names: dict[str, str] = field(default_factory=dict)
    """Texts that it may ask for, such as that of ``eos_token``."""


class Encoder(Protocol):
    """Turns the documents of a corpus into ids."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1."""

    @property
    def eod(self) -> int:
        """The id that ends a document; no text encodes to it."""

    @property
    def digest(self) -> str:
        """Hex digest of all that decides which ids a text gets."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of each text [n]; may use several threads. A lone surrogate is read as "?"."""


class Tokenizer(Encoder, Protocol):
    """The interface of a tokenizer, as far as the package uses it."""

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Ids of tokens by names such as ``<|im_end|>``, beside those that texts are made of."""

    @property
    def reserved(self) -> Collection[str]:
        """Those of these names that are plain text to :meth:`encode`."""

    @property
    def chat(self) -> Chat:
        """Of conversations."""

    @property
    def bos_tokens(self) -> tuple[int, ...]:
        """Tokens that it puts before a text unless it is told not to, such as ``<s>``; those of a
        run never have them."""

    def encode(self, text: str) -> TokenIds:
        """Ids of a text [n], without marks at its ends."""

    def encode_rendered(self, text: str) -> TokenOffsets:
        """Tokens of what a chat template has written, in which every name of
        :attr:`added_tokens` is its token. Raises DataError if their places are not to be had."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of some ids; special tokens and incomplete characters do not make it fail."""
