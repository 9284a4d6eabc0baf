"""The three indices of a token file, from a cache that all processes of a node share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megapipe.data.dataset import TooShort
from megapipe.data.indices.counts import EpochCounts
from megapipe.data.indices.folder import Form, Save, stored_arrays
from megapipe.data.indices.samples import sample_index
from megapipe.data.indices.shuffled import document_index, generator, shuffle_index
from megapipe.data.stored import Array, StoredArray
from megapipe.data.tokens import TokenFile
from megapipe.errors import DataError

_FORMAT = 1
"""Raised when the same request would come out as other arrays."""
_PROBES = 64
_PROBED = 1024
"""Places of the lengths that a digest covers, and lengths at each of them."""


@dataclass(frozen=True)
class Request:
    """Which samples of a token file are wanted.

    Attributes:
        sequences: those of the split, see :func:`~megapipe.data.split.split_ranges`.
        sequence_length: L.
        samples: how many there should be at least, for which epochs are repeated; None for one
            epoch.
        seed: of the order, 0 to 2^32 - 1.
        keep_last: the tokens that do not fill a last sample make a shorter one. In Megatron-LM that
            is a choice for validation, and never done otherwise.
    """

    sequences: range
    sequence_length: int
    samples: int | None
    seed: int
    keep_last: bool = False


@dataclass(frozen=True)
class Indices:
    """The indices of Megatron-LM's GPTDataset, in files.

    Attributes:
        documents: sequences in reading order [epochs * sequences].
        samples: where each sample begins, as a place in `documents` and one in that document
            [M + 1, 2].
        shuffle: the sample of each number [M].
    """

    documents: StoredArray
    samples: StoredArray
    shuffle: StoredArray


def open_indices(
    file: TokenFile,
    request: Request,
    cache: Path,
    note: Callable[[str], None] | None = None,
) -> Indices:
    """The indices of a request, computed by one of the processes that share `cache`.

    That process holds 4 bytes for each sequence of the file, 4 for each sequence and epoch, and 8
    or 4 for each sample (16 or 8 if there are more than 2^31): its sample index and its shuffle
    index one after the other.

    Args:
        cache: the folder for all such indices; they get one of their own in it.
        note: see :func:`~megapipe.data.indices.folder.stored_arrays`.

    Raises:
        ConfigError: a seed that NumPy does not take.
        TooShort: the split has too few tokens.
        DataError: the token file is damaged, the cache cannot be written, or what is there is
            damaged.
    """
    generator(request.seed)  # a seed that it does not take is refused before anything is written
    tokens = _tokens(file, request.sequences)
    try:
        counts = EpochCounts.of(
            tokens, request.sequence_length, request.samples, keep_last=request.keep_last
        )
    except DataError as error:
        where = f"sequences {request.sequences.start} to {request.sequences.stop}"
        raise TooShort(file.path, f"({where}) has {error}") from error

    def compute(save: Save) -> None:
        lengths = _lengths(file, request.sequences, tokens)
        random = generator(request.seed)
        documents = document_index(request.sequences, counts, random)
        save("document_index", documents)
        save(
            "sample_index",
            sample_index(lengths, documents, request.sequence_length, counts.samples),
        )
        del documents, lengths
        save("shuffle_index", shuffle_index(counts, random))

    forms = _forms(len(request.sequences) * counts.epochs, counts.samples)
    folder = cache / _digest(file, request, counts)
    arrays = stored_arrays(folder, forms, compute, note)
    return Indices(*(arrays[name] for name in forms))


def _forms(documents: int, samples: int) -> dict[str, Form]:
    most = np.iinfo(np.int32).max
    return {
        "document_index": ((documents,), "<i4"),
        "sample_index": ((samples + 1, 2), "<i4" if documents <= most else "<i8"),
        "shuffle_index": ((samples,), "<u4" if samples < 2**32 - 2 else "<i8"),
    }


def _tokens(file: TokenFile, sequences: range) -> int:
    """Tokens of the sequences, by where they begin and end."""
    begin, end = file.starts(np.array([sequences.start, sequences.stop]))
    return int(end - begin)


def _lengths(file: TokenFile, sequences: range, tokens: int) -> Array:
    """The lengths of all sequences of the file, after a look at those that are counted on."""
    lengths: Array = file.lengths[:]
    used = lengths[sequences.start : sequences.stop]
    if used.min() < 0 or int(used.sum(dtype=np.int64)) != tokens:
        raise DataError(f"{file.index_path} is damaged: its lengths and offsets do not agree")
    return lengths


def _digest(file: TokenFile, request: Request, counts: EpochCounts) -> str:
    """SHA-256, in hex, of what decides the arrays: more samples of as many epochs are the same."""
    sizes = [len(file.tokens), file.tokens.dtype.str, len(file.lengths), len(file)]
    sequences = [request.sequences.start, request.sequences.stop]
    asked = [request.sequence_length, request.seed, request.keep_last]
    made = [counts.epochs, counts.samples, counts.apart]
    found = hashlib.sha256(json.dumps([_FORMAT, sizes, sequences, asked, made]).encode())
    last = max(len(file.lengths) - _PROBED, 0)
    for start in np.unique(np.linspace(0, last, _PROBES).astype(np.int64)):
        found.update(file.lengths[start : start + _PROBED].tobytes())
    return found.hexdigest()
