"""Which pieces of which documents make up each sample, kept in a folder."""

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
"""Raised when the same documents would be packed in another way."""
AT_ONCE = 2**22
"""Documents that are packed together: what bounds the memory, at some hundreds of MiB."""
_PROBES = 64


class Packing(NamedTuple):
    """The pieces of B samples, sample after sample: P of them, each a run of tokens of a document.

    A piece of n tokens and the one that follows makes n positions, each with its label.
    """

    samples: StoredArray
    """[B + 1] int64: the first piece of each sample, and P."""
    starts: StoredArray
    """[P] int64: the first token of each piece in its file."""
    lengths: StoredArray
    """[P] int32: its positions, 1 to L."""


class PackingRule(NamedTuple):
    """How documents become pieces of samples of L = `length` positions.

    A document of n tokens has n - 1 positions; where that is more than L - `spare`, it is cut into
    pieces of so many and a rest. One of a single token has none.
    """

    length: int
    spare: int = 0
    """Positions that are left free for each piece."""
    cut: bool = True
    """False: a document that is too long is left out."""


def open_packing(stream: Stream, rule: PackingRule, cache: Path) -> Packing:
    """How the documents of a stream are packed into samples, computed by one of the processes that
    share `cache`.

    Documents are packed 4 million at a time, in their order. The arrays take 12 bytes a piece and 8
    a sample.

    Raises:
        TooShort: there is nothing to pack.
        DataError: a sample has no room for more than what is spare, the token file is damaged, the
            cache cannot be written, or what is there is damaged.
    """
    if rule.length <= rule.spare:
        raise DataError(
            f"train.sequence_length={rule.length}: expected more than the {rule.spare} positions "
            "that are left free for each document"
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
        raise DataError(f"{folder} is damaged: remove it to have it made again")
    return found


def _pack(stream: Stream, rule: PackingRule) -> dict[str, Array]:
    """The arrays of a packing, by name."""
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
    """First token and positions of the documents of a stream, some at a time."""
    file = stream.file
    ends = stream.sequences.start, stream.sequences.stop
    low = bisect.bisect_right(file.documents, ends[0]) - 1
    high = bisect.bisect_left(file.documents, ends[1])
    for at in range(low, high, AT_ONCE):  # what a split cuts off of a document is left out
        boundaries = np.clip(file.documents[at : min(at + AT_ONCE, high) + 1], *ends)
        tokens = file.starts(boundaries)
        yield tokens[:-1], np.diff(tokens) - 1


def _pieces(first: Numbers, positions: Numbers, length: int) -> tuple[Numbers, Numbers]:
    """Starts and lengths of the pieces of documents, at most so long."""
    counts = np.maximum(-(-positions // length), 0)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(first, counts) + number * length
    return starts, np.minimum(np.repeat(positions, counts) - number * length, length)


def _nothing(stream: Stream, rule: PackingRule) -> str:
    if rule.cut:
        return "has no document of 2 tokens or more to pack: use more text"
    return (
        f"has no example that train.sequence_length={rule.length} has room for, as "
        f"{'its only one is' if len(stream.sequences) == 1 else f'all {len(stream.sequences)} are'}"
        " longer: expected a larger one"
    )


def _digest(stream: Stream, rule: PackingRule) -> str:
    """Of what decides the packing: the lengths of the documents, by their ends at some places."""
    boundaries = stream.file.documents
    chosen = np.unique(np.linspace(0, len(boundaries) - 1, _PROBES).astype(np.int64))
    ends = stream.file.starts(boundaries[chosen]).tolist()
    place = [stream.sequences.start, stream.sequences.stop]
    known = [_FORMAT, *rule, *place, len(boundaries), len(stream.file.lengths), ends]
    known += [str(stream.file.path.resolve()), stream.file.index_path.stat().st_mtime_ns]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]
