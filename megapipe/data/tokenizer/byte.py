"""A tokenizer with bytes as tokens."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from megapipe.data.tokenizer.interface import Chat, TokenIds, TokenOffsets


class ByteTokenizer:
    """Tokenizer whose tokens are the bytes of the text in UTF-8; id 256 is the EOS token."""

    vocab_size = 257
    eod = 256
    digest = hashlib.sha256(b"byte 257").hexdigest()
    added_tokens: Mapping[str, int] = MappingProxyType({})
    reserved: Collection[str] = ()
    chat = Chat()
    bos_tokens: tuple[int, ...] = ()

    def encode(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def encode_rendered(self, text: str) -> TokenOffsets:
        each = [len(character.encode(errors="replace")) for character in text]
        starts = np.repeat(np.arange(len(text)), each)
        return TokenOffsets(self.encode(text), starts, starts + 1)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")
