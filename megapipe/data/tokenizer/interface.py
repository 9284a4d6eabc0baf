"""The interfaces of tokenizers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.integer[Any]]


class TokenOffsets(NamedTuple):
    """Tokens of a text, and each token's range of characters."""

    ids: TokenIds
    """Token ids [n]."""
    starts: npt.NDArray[np.int64]
    """Index of each token's first character [n]."""
    stops: npt.NDArray[np.int64]
    """Index of the character after each token's last one [n]."""


@dataclass(frozen=True)
class Chat:
    """How a tokenizer renders conversations: its chat template, and texts for the template."""

    template: str | None = None
    """Template in Jinja, as `transformers` renders it."""
    names: dict[str, str] = field(default_factory=dict)
    """Texts that the template may use, by name, for example ``eos_token``."""


class Encoder(Protocol):
    """Turns the documents of a corpus into ids."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; ids run from 0 to vocab_size - 1."""

    @property
    def eod(self) -> int:
        """Id of the EOS token, which ends a document; no text is encoded to it."""

    @property
    def digest(self) -> str:
        """Hex digest of everything that determines the ids of a text."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the ids of each text [n]; may use threads. A lone surrogate is read as "?"."""


class Tokenizer(Encoder, Protocol):
    """The methods of a tokenizer that megapipe uses."""

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Ids of added tokens by name, for example ``<|im_end|>``."""

    @property
    def reserved(self) -> Collection[str]:
        """Names among :attr:`added_tokens` that :meth:`encode` treats as plain text: the special
        tokens."""

    @property
    def chat(self) -> Chat:
        """The tokenizer's chat template, and the texts that the template may use."""

    @property
    def bos_tokens(self) -> tuple[int, ...]:
        """Tokens that the tokenizer prepends to a text by default, for example ``<s>``; megapipe
        never adds them in a run."""

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a text [n], without BOS and EOS tokens."""

    def encode_rendered(self, text: str) -> TokenOffsets:
        """Tokenize the output of a chat template; each name in :attr:`added_tokens` becomes that
        token. Raises DataError if the tokenizer cannot tell which characters belong to a token."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; special tokens and incomplete characters cause no error."""
