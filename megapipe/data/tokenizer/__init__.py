"""Tokenizers: bytes, and what `tokenizers`, `transformers` and `tiktoken` load."""

from megapipe.data.tokenizer.byte import ByteTokenizer
from megapipe.data.tokenizer.interface import TokenIds, Tokenizer
from megapipe.data.tokenizer.load import load_tokenizer

__all__ = ["ByteTokenizer", "TokenIds", "Tokenizer", "load_tokenizer"]
