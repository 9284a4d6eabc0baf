"""The index of packed samples: which pieces of documents are in each sample, stored in a folder."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megapipe.data.dataset import Stream, TooShort
from megapipe.data.indices.folder import Save, stored_arrays
from megapipe.data.packing.best_fit import Numbers, best_fit
from megapipe.data.stored import Array, StoredArray
from megapipe.errors import DataError

_FORMAT = 1
"""Version of the packing; increased when the same documents would be packed differently."""
AT_ONCE = 2**22
"""Number of documents that are packed together; limits the memory to some hundreds of MiB."""
_PROBES = 64


class Packing(NamedTuple):
    """The P pieces of B packed samples, sample after sample.

    A piece of n positions is a range of n tokens of a document; the last label is the token after
    the range.
    """

    samples: StoredArray
    """[B + 1] int64: index of each sample's first piece, and P at the end."""
    starts: StoredArray
    """[P] int64: position of each piece's first token in the token file."""
    lengths: StoredArray
    """[P] int32: number of positions of each piece, 1 to L."""


class PackingRule(NamedTuple):
    """How documents become pieces of samples of L = `length` positions.

    A document of n tokens has n - 1 positions, as its last token is only a label. A document with
    more than L - `spare` positions is cut into pieces of L - `spare` positions and a shorter rest.
    """

    length: int
    spare: int = 0
    """Number of positions that a sample reserves for each piece, besides the piece's own."""
    cut: bool = True
    """Whether a document that is too long is cut; otherwise it is dropped."""


def open_packing(stream: Stream, rule: PackingRule, cache: Path) -> Packing:
    """Return how a stream's documents are packed into samples; one of the processes that share
    `cache` computes it.

    Documents are packed 4 million at a time, in their order. The arrays take 12 bytes per piece and
    8 per sample.

    Raises:
        TooShort: there is nothing to pack.
        DataError: a sample is not longer than `spare`, the token file or the stored index is
            damaged, or the cache cannot be written.
    """
    if rule.length <= rule.spare:
        raise DataError(
            f"train.sequence_length={rule.length}: expected more than the {rule.spare} "
            "positions reserved per document"
        )

    def compute(save: Save) -> None:
        found = _pack(stream, rule)
        if not len(found["starts"]):
            raise TooShort(stream.file.path, _nothing(stream, rule))
        for name, array in found.items():
            save(name, array)

    folder = cache / f"packing-{_digest(stream, rule)}"
    forms = {"samples": ((None,), "<i8"), "starts": ((None,), "<i8"), "lengths": ((None,), "<i4")}
    found = Packing(**stored_arrays(folder, forms, compute))
    if found.samples[-1] != len(found.starts) or len(found.starts) != len(found.lengths):
        raise DataError(f"{folder} is damaged: remove it and it is rebuilt")
    return found


def _pack(stream: Stream, rule: PackingRule) -> dict[str, Array]:
    """Return the arrays of a packing, by name."""
    found: dict[str, list[Array]] = {
        "samples": [np.zeros(1, np.int64)],
        "starts": [np.empty(0, np.int64)],
        "lengths": [np.empty(0, np.int32)],
    }
    pieces = 0
    for first, positions in _documents(stream):
        most = rule.length - rule.spare
        if not rule.cut:
            first, positions = first[positions <= most], positions[positions <= most]
        some, sizes = _pieces(first, positions, most)
        if not len(some):
            continue
        sample_of = best_fit(sizes + rule.spare, rule.length)
        order = np.argsort(sample_of, kind="stable")
        found["starts"].append(some[order])
        found["lengths"].append(sizes[order].astype(np.int32))
        found["samples"].append(pieces + np.cumsum(np.bincount(sample_of)))
        pieces += len(order)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _documents(stream: Stream) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield the position in the file of each document's first token, and each document's number of
    positions, many documents at a time."""
    file = stream.file
    ends = stream.sequences.start, stream.sequences.stop
    low = bisect.bisect_right(file.documents, ends[0]) - 1
    high = bisect.bisect_left(file.documents, ends[1])
    for at in range(low, high, AT_ONCE):  # a document's part beyond the split is dropped
        boundaries = np.clip(file.documents[at : min(at + AT_ONCE, high) + 1], *ends)
        tokens = file.starts(boundaries)
        yield tokens[:-1], np.diff(tokens) - 1


def _pieces(first: Numbers, positions: Numbers, length: int) -> tuple[Numbers, Numbers]:
    """Cut documents into pieces of at most `length` positions. Return the position in the file of
    each piece's first token, and each piece's number of positions."""
    counts = np.maximum(-(-positions // length), 0)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(first, counts) + number * length
    return starts, np.minimum(np.repeat(positions, counts) - number * length, length)


def _nothing(stream: Stream, rule: PackingRule) -> str:
    if rule.cut:
        return "has no document of 2 tokens or more to pack: use more text"
    return (
        f"has no example of at most train.sequence_length={rule.length} tokens: "
        f"{'its only one is' if len(stream.sequences) == 1 else f'all {len(stream.sequences)} are'}"
        " longer: expected a larger train.sequence_length"
    )


def _digest(stream: Stream, rule: PackingRule) -> str:
    """Return a digest of what determines the packing; it covers only some documents' lengths."""
    boundaries = stream.file.documents
    chosen = np.unique(np.linspace(0, len(boundaries) - 1, _PROBES).astype(np.int64))
    ends = stream.file.starts(boundaries[chosen]).tolist()
    bounds = [stream.sequences.start, stream.sequences.stop]
    known = [_FORMAT, *rule, *bounds, len(boundaries), len(stream.file.lengths), ends]
    known += [str(stream.file.path.resolve()), stream.file.index_path.stat().st_mtime_ns]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]
