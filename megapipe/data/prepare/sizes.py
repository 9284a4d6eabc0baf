"""Sizes of a corpus or of a split."""

from pathlib import Path

from megapipe.config.section import Section
from megapipe.data.tokens import TokenFile


class CorpusSizes(Section):
    """Numbers of documents, tokens and bytes of a corpus or split."""

    documents: int
    """Number of documents."""
    tokens: int
    """Number of tokens, including the EOS token of each document."""
    text_bytes: int
    """Number of bytes of the text as UTF-8."""
    longest: int
    """Number of tokens of the longest document."""


def sizes_of(prefix: Path, text_bytes: int) -> CorpusSizes:
    """Return the sizes of a token file that was made from `text_bytes` bytes of text."""
    file = TokenFile(prefix)
    return CorpusSizes(
        documents=len(file),
        tokens=len(file.tokens),
        text_bytes=text_bytes,
        longest=max((int(lengths.max()) for lengths in file.document_lengths()), default=0),
    )
