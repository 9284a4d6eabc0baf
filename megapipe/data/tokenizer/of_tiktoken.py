"""Encodings of OpenAI's `tiktoken`, if that package is installed."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megapipe.data.tokenizer.interface import Chat, TokenIds, TokenOffsets
from megapipe.errors import DataError
from megapipe.text import one_line, without_surrogates

PREFIX = "tiktoken:"


class TiktokenTokenizer:
    """A ``tiktoken.Encoding``; special tokens spelled out in a text are plain text."""

    bos_tokens: tuple[int, ...] = ()

    def __init__(self, encoding: Any) -> None:
        self.encoding = encoding
        self.vocab_size: int = encoding.n_vocab
        self.eod: int = encoding.eot_token
        special = sorted(encoding.special_tokens_set)
        self.added_tokens = {name: int(encoding.encode_single_token(name)) for name in special}
        self.reserved = frozenset(special)
        self._special = frozenset(self.added_tokens.values())
        self.chat = Chat(names={"eos_token": encoding.decode([self.eod])})
        ranks = hashlib.sha256(f"{self.eod} {encoding._pat_str}".encode())
        for token, rank in sorted(encoding._mergeable_ranks.items()):
            ranks.update(token + b" %d " % rank)
        self.digest = ranks.hexdigest()

    def encode(self, text: str) -> TokenIds:
        found: TokenIds = self.encoding.encode_to_numpy(
            without_surrogates(text), disallowed_special=()
        )
        return found.astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def encode_rendered(self, text: str) -> TokenOffsets:
        ids = self.encoding.encode(without_surrogates(text), allowed_special="all")
        _, offsets = self.encoding.decode_with_offsets(ids)
        starts = np.array(offsets, np.int64)
        stops = np.append(starts[1:], len(text))[: len(starts)]
        return TokenOffsets(np.array(ids, np.int32), starts, np.maximum(stops, starts + 1))

    def decode(self, ids: Iterable[int]) -> str:
        found = b"".join(self._bytes(token) for token in ids if token not in self._special)
        return found.decode("utf-8", errors="replace")

    def _bytes(self, token: int) -> bytes:
        try:
            found: bytes = self.encoding.decode_single_token_bytes(token)
        except KeyError:  # ids without a token
            return b""
        return found


def load(name: str) -> TiktokenTokenizer:
    """Load the encoding ``tiktoken:NAME``. Raises DataError if it fails or has no EOS token."""
    try:
        import tiktoken
    except ImportError:
        raise DataError(
            f"tokenizer {name!r}: tiktoken is not installed; pip install tiktoken"
        ) from None
    try:
        encoding = tiktoken.get_encoding(name.removeprefix(PREFIX))
        encoding.eot_token  # noqa: B018
    except KeyError:
        raise DataError(f"tokenizer {name!r}: no end-of-document token <|endoftext|>") from None
    except Exception as error:  # whatever reading or fetching its ranks raises
        raise DataError(f"tokenizer {name!r}: cannot be loaded ({one_line(error)})") from error
    return TiktokenTokenizer(encoding)
