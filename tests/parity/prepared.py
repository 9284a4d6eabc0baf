"""Texts of a prepared corpus, and a tokenizer that must not be used."""

from typing import Any

import numpy as np

from megapipe.data.prepare import Prepared
from megapipe.data.tokenizer import ByteTokenizer, TokenIds
from megapipe.data.tokens import TokenFile


class Barred(ByteTokenizer):
    """A tokenizer that the cache should make unnecessary."""

    def encode_batch(self, texts: Any) -> list[TokenIds]:
        raise AssertionError("tokenized again")


def texts_of(prepared: Prepared, split: str) -> list[str]:
    """Return the documents of a split, decoded from its token file."""
    tokens = TokenFile(prepared.folder / split).tokens[:]
    assert tokens[-1] == 256
    ends = np.flatnonzero(tokens == 256)
    starts = [0, *(ends[:-1] + 1)]
    return [
        ByteTokenizer().decode(tokens[start:end].tolist())
        for start, end in zip(starts, ends, strict=True)
    ]
