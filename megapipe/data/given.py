"""A token file that the user has: ``data.source=PREFIX``.

Its first documents are trained on, the last share of them, ``data.validation_fraction``, is held
out. The file is read where it is, and nothing is written.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megapipe.config import DataConfig
from megapipe.data.dataset import Split, TokenDataset
from megapipe.data.tokens import TokenFile
from megapipe.data.tokens.format import bin_of, idx_of, without_suffix
from megapipe.errors import DataError

TEXT_KEYS = ("subset", "dataset_split", "text_field", "cache", "workers")
"""Keys of ``data`` that only a corpus of texts has a use for."""
_PROBES = 64
_PROBED = 1024
"""Places of a file that its digest covers, and tokens at each of them."""


def is_given(source: str) -> bool:
    """Whether a ``data.source`` is the prefix of a token file, or one of its two files."""
    path = Path(source).expanduser()
    prefix = without_suffix(path)
    if prefix != path:
        return path.is_file()
    return not path.exists() and (idx_of(prefix).exists() or bin_of(prefix).exists())


@dataclass(frozen=True)
class GivenTokens:
    """A token file, and the positions of each split in it.

    Attributes:
        content: SHA-256, in hex, of its sizes, the splits and tokens at some places.
    """

    file: TokenFile
    train: range
    validation: range
    content: str

    @property
    def digest(self) -> str:
        """The same as `content`: where the file lies decides nothing."""
        return self.content

    @property
    def entropy(self) -> None:
        """None: the unigram entropy is not known without reading all tokens."""

    def dataset(self, split: Split, sequence_length: int) -> TokenDataset:
        """The samples of a split. Raises DataError if it is too short for one."""
        span = self.train if split == "train" else self.validation
        return TokenDataset(self.file, sequence_length, span, keep_last=split == "validation")


def given_tokens(config: DataConfig) -> GivenTokens:
    """The token file of `config`.

    Raises:
        DataError: it is damaged, or too small to hold out a part of it.
    """
    file = TokenFile(without_suffix(Path(config.source).expanduser()))
    total = len(file.tokens)
    if total < 2:
        raise DataError(f"{file.path} has {total} tokens: nothing to hold out")
    cut = _cut(file, config.validation_fraction)
    train, validation = range(cut), range(cut, total)
    found = hashlib.sha256(repr([total, len(file), train, validation]).encode())
    for start in np.unique(np.linspace(0, max(total - _PROBED, 0), _PROBES).astype(np.int64)):
        found.update(file.tokens[start : start + _PROBED].astype("<i8").tobytes())
    return GivenTokens(file, train, validation, found.hexdigest())


def _cut(file: TokenFile, fraction: float) -> int:
    """The token that the held-out part begins with: of a document, unless there is but one."""
    total, documents = len(file.tokens), len(file)
    if documents > 1:
        first = min(max(round(documents * (1 - fraction)), 1), documents - 1)
        cut = int(file.starts(file.documents[first : first + 1])[0])
        if 0 < cut < total:
            return cut
    return min(max(round(total * (1 - fraction)), 1), total - 1)
