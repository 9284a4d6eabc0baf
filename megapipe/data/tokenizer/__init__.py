"""Tokenizers: bytes, and tokenizers that `tokenizers`, `transformers` and `tiktoken` load."""

from megapipe.data.tokenizer.byte import ByteTokenizer
from megapipe.data.tokenizer.interface import Chat, Encoder, TokenIds, Tokenizer, TokenOffsets
from megapipe.data.tokenizer.load import load_tokenizer

__all__ = [
    "ByteTokenizer",
    "Chat",
    "Encoder",
    "TokenIds",
    "TokenOffsets",
    "Tokenizer",
    "load_tokenizer",
]
