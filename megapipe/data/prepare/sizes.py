"""How much there is of a corpus, or of a part of it."""

from pathlib import Path

from megapipe.config.section import Section
from megapipe.data.tokens import TokenFile


class CorpusSizes(Section):
    """Documents, and what is in them."""

    documents: int
    """Documents."""
    tokens: int
    """Tokens, the end mark of each document included."""
    text_bytes: int
    """Bytes of the text as UTF-8."""
    longest: int
    """Tokens of the longest document."""


def sizes_of(prefix: Path, text_bytes: int) -> CorpusSizes:
    """Sizes of a token file, whose texts have so many bytes."""
    file = TokenFile(prefix)
    return CorpusSizes(
        documents=len(file),
        tokens=len(file.tokens),
        text_bytes=text_bytes,
        longest=max((int(lengths.max()) for lengths in file.document_lengths()), default=0),
    )
