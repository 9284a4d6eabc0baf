"""Texts of a corpus, from wherever ``data.source`` says, in parts that processes share."""

from megapipe.data.corpus.cutting import Piece
from megapipe.data.corpus.dividing import Part, is_one_text, parts, pieces, total_bytes
from megapipe.data.corpus.files import identity
from megapipe.data.corpus.rows import Rows

__all__ = ["Part", "Piece", "Rows", "identity", "is_one_text", "parts", "pieces", "total_bytes"]
