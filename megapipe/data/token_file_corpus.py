"""A token file that the user gives: ``data.source=PREFIX``.

By default the last documents, a fraction ``data.validation_fraction`` of all, are held out, and
training uses the others. With ``data.split`` the sequences are divided as in Megatron-LM. The file
is read in place, and nothing is written.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megapipe.config.data import DataConfig
from megapipe.data.dataset import SPLITS, Split, Stream
from megapipe.data.split import split_ranges
from megapipe.data.tokens import TokenFile
from megapipe.data.tokens.format import bin_of, idx_of, without_suffix
from megapipe.errors import DataError
from megapipe.text import count_noun
from megapipe.util.paths import exists, is_file, user_path

TEXT_KEYS = ("subset", "dataset_split", "text_field")
"""Configuration keys of ``data`` that apply only to texts, not to token files."""
_PROBES, _PROBED = 64, 1024
"""Number of places in a file that its digest covers, and number of tokens at each place."""
_PURPOSE: Mapping[Split, str] = {
    "train": "to train on: expected a larger first weight",
    "validation": "to validate on: expected a larger second weight, or 0",
    "test": "to test on: expected a larger third weight, or 0",
}
"""End of the error about an empty split."""


def is_token_file(source: str) -> bool:
    """Whether a ``data.source`` is a token file's prefix, or one of the token file's two files."""
    path = user_path(source)
    if not path.name:  # a folder, such as "."
        return False
    prefix = without_suffix(path)
    if prefix != path:
        return is_file(path)
    free = not exists(path) or _is_megatrons_cache(path)
    return free and (exists(idx_of(prefix)) or exists(bin_of(prefix)))


def _is_megatrons_cache(path: Path) -> bool:
    """Whether a folder contains only the indices that Megatron-LM keeps in PREFIX/cache."""
    return any(path.glob("cache/*_indices")) and len(list(path.iterdir())) == 1


@dataclass(frozen=True)
class TokenFileCorpus:
    """A token file, and the tokens of each split in it.

    Attributes:
        content: SHA-256, in hex, of the file's sizes, the splits and tokens at some positions.
    """

    file: TokenFile
    parts: Mapping[Split, Stream]
    content: str

    @property
    def digest(self) -> str:
        """Equal to `content`, as the file's location does not matter."""
        return self.content

    @property
    def entropy(self) -> None:
        """None, as the unigram entropy is unknown without reading all tokens."""

    def part(self, split: Split) -> Stream | None:
        """Return the tokens of a split; None if the split has none."""
        return self.parts.get(split)


def given_tokens(config: DataConfig) -> TokenFileCorpus:
    """Return the token file of `config`, divided into splits.

    Raises:
        DataError: the file is damaged or too small to hold out a part, or nothing is left to train
            on.
    """
    file = TokenFile(without_suffix(user_path(config.source)))
    parts = _split(file, config.split) if config.split is not None else _divided(file, config)
    total = len(file.tokens)
    positions = [stream.positions for stream in parts.values()]
    found = hashlib.sha256(repr([total, len(file), *positions]).encode())
    for start in np.unique(np.linspace(0, max(total - _PROBED, 0), _PROBES).astype(np.int64)):
        found.update(file.read(start, min(start + _PROBED, total)).astype("<i8").tobytes())
    return TokenFileCorpus(file, parts, found.hexdigest())


def _split(file: TokenFile, weights: str) -> dict[Split, Stream]:
    """Return the splits that ``data.split`` defines, without splits of weight 0."""
    sequences = len(file.lengths)
    given = [float(weight) for weight in weights.split(",")] + [0.0, 0.0]
    parts = {}
    for split, some, weight in zip(SPLITS, split_ranges(weights, sequences), given, strict=False):
        stream = Stream.of(file, some)
        if stream.positions:
            parts[split] = stream
        elif weight or split == "train":
            left = "only empty documents" if some else "nothing"
            raise DataError(
                f"data.split={weights} leaves {left} of the {sequences} sequences of {file.path} "
                f"{_PURPOSE[split]}"
            )
    return parts


def _divided(file: TokenFile, config: DataConfig) -> dict[Split, Stream]:
    total, sequences = len(file.tokens), range(len(file.lengths))
    if not config.validation_fraction:
        return {"train": Stream(file, sequences, range(total))}
    if total < 2:
        raise DataError(f"{file.path} has {count_noun(total, 'token')}: nothing to hold out")
    sequence, token = _cut(file, config.validation_fraction)
    cut = sequences.stop if sequence is None else sequence
    return {
        "train": Stream(file, range(0 if sequence is None else cut), range(token)),
        "validation": Stream(file, sequences[cut:], range(token, total)),
    }


def _cut(file: TokenFile, fraction: float) -> tuple[int | None, int]:
    """Return the index of the sequence and of the token with which the held-out part begins.

    The held-out part begins with the document that is nearest to the requested fraction, among
    documents that leave tokens to both parts. If all tokens belong to one document, it is cut at a
    token, and the sequence is None.
    """
    total, documents = len(file.tokens), len(file)

    def begin(document: int) -> int:
        return int(file.starts(np.array([int(file.documents[document])]))[0])

    least = bisect_right(range(documents), 0, key=begin)
    most = bisect_left(range(documents), total, key=begin) - 1
    if least <= most:
        first = min(max(round(documents * (1 - fraction)), least), most)
        return int(file.documents[first]), begin(first)
    return None, min(max(round(total * (1 - fraction)), 1), total - 1)
