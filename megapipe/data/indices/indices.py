"""Megatron-LM's document, sample and shuffle index of a token file, from a cache that all processes
of a node share."""

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
"""Version of the cached arrays; increased when the same request would give other arrays."""
_PROBES, _PROBED = 64, 1024
"""Number of places in the index that a digest covers, and number of lengths at each place."""


@dataclass(frozen=True)
class Request:
    """The samples that a run needs of a token file.

    Attributes:
        sequences: the split's sequences, see :func:`~megapipe.data.split.split_ranges`.
        sequence_length: L.
        samples: minimum number of samples, reached by repeating epochs; None: one epoch.
        seed: seed of the order, 0 to 2^32 - 1.
        keep_last: whether tokens that do not fill a last sample make a shorter sample, which
            Megatron-LM does in validation only.
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
        samples: where each sample begins: index in `documents`, and token in that document [M + 1,
            2].
        shuffle: the samples in shuffled order [M].
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
    """Return the indices for a request; one of the processes that share `cache` computes them.

    The computing process holds 4 bytes for each sequence of the file, 4 bytes for each sequence and
    epoch, and for each sample first 8 bytes (sample index), then 4 (shuffle index); twice as many
    beyond 2^31 documents or 2^32 samples.

    Args:
        cache: folder in which the indices for each request have a subfolder.
        note: called with a line of text if another process must be awaited; default: print it to
            stderr.

    Raises:
        ConfigError: NumPy does not accept the seed.
        TooShort: the split has too few tokens.
        DataError: the token file or the content of the cache is damaged, or the cache cannot be
            written.
    """
    generator(request.seed)  # refuse a bad seed before anything is written
    tokens = _tokens(file, request.sequences)
    try:
        counts = EpochCounts.of(
            tokens, request.sequence_length, request.samples, keep_last=request.keep_last
        )
    except DataError as error:
        sequences_text = f"sequences {request.sequences.start} to {request.sequences.stop}"
        raise TooShort(file.path, f"({sequences_text}) has {error}") from error

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
    """Return the number of tokens of the sequences, computed from where they begin and end."""
    begin, end = file.starts(np.array([sequences.start, sequences.stop]))
    return int(end - begin)


def _lengths(file: TokenFile, sequences: range, tokens: int) -> Array:
    """Return the lengths of all sequences of the file. Raises DataError unless the sum over
    `sequences` is `tokens`, and none of them is negative."""
    lengths: Array = file.lengths[:]
    used = lengths[sequences.start : sequences.stop]
    if used.min() < 0 or int(used.sum(dtype=np.int64)) != tokens:
        raise DataError(f"{file.index_path} is damaged: its lengths and offsets do not agree")
    return lengths


def _digest(file: TokenFile, request: Request, counts: EpochCounts) -> str:
    """Return the SHA-256, in hex, of what determines the arrays; it covers only some lengths.
    Requests for different numbers of samples have equal digests if their `counts` are equal."""
    sizes = [len(file.tokens), file.tokens.dtype.str, len(file.lengths), len(file)]
    sequences = [request.sequences.start, request.sequences.stop]
    asked = [request.sequence_length, request.seed, request.keep_last]
    made = [counts.epochs, counts.samples, counts.apart]
    found = hashlib.sha256(json.dumps([_FORMAT, sizes, sequences, asked, made]).encode())
    last = max(len(file.lengths) - _PROBED, 0)
    for start in np.unique(np.linspace(0, last, _PROBES).astype(np.int64)):
        found.update(file.lengths[start : start + _PROBED].tobytes())
    return found.hexdigest()
