"""Texts of the corpus ``data.source``, in shards that several processes tokenize."""

from megapipe.data.corpus.corpus_shards import CorpusShard, is_one_text, parts, pieces, total_bytes
from megapipe.data.corpus.files import identity
from megapipe.data.corpus.rows import RowParser
from megapipe.data.corpus.text_chunks import TextChunk

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
