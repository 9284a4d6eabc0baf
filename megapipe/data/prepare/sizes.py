"""How much there is of a corpus, or of a part of it."""

from pathlib import Path

import numpy as np

from megapipe.data.tokens import TokenFile
from megapipe.section import Section


class Sizes(Section):
    """Documents, and what is in them."""

    documents: int
    """Documents."""
    tokens: int
    """Tokens, the end mark of each document included."""
    text_bytes: int
    """Bytes of the text as UTF-8."""
    longest: int
    """Tokens of the longest document."""


def sizes_of(prefix: Path, text_bytes: int) -> Sizes:
    """Sizes of a token file, whose texts have so many bytes."""
    file = TokenFile(prefix)
    return Sizes(
        documents=len(file),
        tokens=len(file.tokens),
        text_bytes=text_bytes,
        longest=longest_document(file),
    )


def longest_document(file: TokenFile) -> int:
    """Tokens of the longest document of a file; 0 if there is none."""
    longest = 0
    for first in range(0, len(file), 2**20):
        starts = file.starts(file.documents[first : first + 2**20 + 1])
        longest = max(longest, int(np.diff(starts).max()))
    return longest
