"""Token files, Megatron-LM's ``.bin`` and ``.idx``: read, written, joined, divided, checked."""

from megapipe.data.tokens.reader import TokenFile
from megapipe.data.tokens.writer import TokenWriter

__all__ = ["TokenFile", "TokenWriter"]
