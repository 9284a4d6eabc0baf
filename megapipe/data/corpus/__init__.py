"""Texts of a corpus, from wherever ``data.source`` says, in parts that processes share."""

from megapipe.data.corpus.cutting import TextChunk
from megapipe.data.corpus.dividing import CorpusShard, is_one_text, parts, pieces, total_bytes
from megapipe.data.corpus.files import identity
from megapipe.data.corpus.rows import RowParser

__all__ = [
    "CorpusShard",
    "RowParser",
    "TextChunk",
    "identity",
    "is_one_text",
    "parts",
    "pieces",
    "total_bytes",
]
