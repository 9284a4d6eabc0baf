"""Indices of token files and their samples, compared with megatron-core: a part of data.py.

Both sides run in one process and take turns; ratios are ours / its, times processor time.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from common import Comparison, Result, compare

from megapipe.data.indices import (
    IndexedDataset,
    Request,
    blend_index,
    open_indices,
    sample_index,
)
from megapipe.data.indices.blend import Index
from megapipe.data.stored import MemoryBudget
from megapipe.data.tokens import TokenFile
from megapipe.data.tokens.format import Header, bin_of, idx_of

CORPORA = ((600, 2048), (600, 8192), (6000, 4096), (100, 4096))
"""Mean tokens of a document, and L."""
WEIGHTS = ([0.7, 0.3], [0.4, 0.25, 0.15, 0.1, 0.07, 0.02, 0.01])
SLOWER = 10
"""Target factor of blend indices, which are built once and need seconds for 100 million samples."""


def index_claims(folder: Path, *, quick: bool) -> list[Result]:
    """Return claims about indices and samples; none if megatron-core is not installed."""
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        print("megatron-core is not installed: its indices are left out", file=sys.stderr)
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about other packages that are not installed
        from megatron.core.datasets import helpers_cpp
    documents, rounds = (2000, 1) if quick else (2_000_000, 9)
    blended = 5000 if quick else 10_000_000
    return [
        *(
            sample_index_claim(helpers_cpp, version, documents, *corpus, rounds)
            for corpus in CORPORA
        ),
        *blend_claims(helpers_cpp, version, blended, 1 if quick else 3),
        *sample_claims(folder, version, quick=quick),
    ]


def timed(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def lengths_of(documents: int, mean: int) -> npt.NDArray[np.int32]:
    """Draw lengths as texts have them: log-normal, of at most a million tokens."""
    found = np.random.default_rng(0).lognormal(np.log(mean) - 0.5, 1.0, documents)
    return np.clip(found, 1, 2**20).astype(np.int32)


def result(claim: str, times: Comparison, target: float, peer: str) -> Result:
    ours, its = (statistics.median(side) for side in (times.ours, times.theirs))
    return Result(claim, times.ratio, target, "x", f"{peer}; {ours:.3g} s to {its:.3g} s")


def sample_index_claim(
    helpers: Any, version: str, documents: int, mean: int, length: int, rounds: int
) -> Result:
    """Compare the index of three epochs, shuffled together."""
    lengths, epochs = lengths_of(documents, mean), 3
    tokens = int(lengths.sum())
    order = np.tile(np.arange(documents, dtype=np.int32), epochs)
    np.random.RandomState(0).shuffle(order)
    samples = (epochs * tokens - 1) // length

    def ours() -> npt.NDArray[Any]:
        return sample_index(lengths, order, length, samples)

    def its() -> npt.NDArray[Any]:
        return helpers.build_sample_idx_int32(lengths, order, length, epochs, tokens, True, 1)

    assert np.array_equal(ours(), its())
    times = compare(lambda: timed(ours), lambda: timed(its), rounds=rounds)
    claim = f"sample index, documents of {mean} tokens on average, L {length}"
    peer = f"megatron-core {version}'s helper, {documents:,} documents, {epochs} epochs"
    return result(claim, times, 1, peer)


def blend_claims(helpers: Any, version: str, size: int, rounds: int) -> list[Result]:
    """Compare blends of two sources and of seven."""
    found = np.zeros(size, np.int16), np.zeros(size, np.int64)
    results = []
    for weights in WEIGHTS:
        n = len(weights)

        def ours(weights: list[float] = weights) -> Index:
            return blend_index(weights, size)

        def its(weights: list[float] = weights, n: int = n) -> None:
            helpers.build_blending_indices(*found, weights, n, size, False)

        times = compare(partial(timed, ours), partial(timed, its), rounds=rounds)
        mine = ours()
        assert np.array_equal(mine[0], found[0])
        assert np.array_equal(mine[1], found[1])
        peer = f"megatron-core {version}'s helper, {size:,} samples"
        results.append(result(f"blend index, {n} sources", times, SLOWER, peer))
    return results


def sample_claims(folder: Path, version: str, *, quick: bool) -> list[Result]:
    """Read random samples of a file in memory; masks and positions are those that its data set
    keeps."""
    results = []
    for mean, length in CORPORA:
        prefix = folder / f"of{mean}x{length}"
        file = TokenFile(write(prefix, lengths_of((60_000 if quick else 30_000_000) // mean, mean)))
        request = Request(range(len(file.lengths)), length, None, 0)
        indices = open_indices(file, request, folder / "indices")
        MemoryBudget().hold([file.offsets, indices.documents, indices.samples, indices.shuffle])
        ours = IndexedDataset(file, indices, length)
        its = theirs(prefix, len(file.lengths), length)
        assert len(ours) == len(its)
        draws, rounds = (10, 1) if quick else (2000, 9)
        numbers = np.random.default_rng(0).integers(0, len(ours), draws).tolist()
        for number in numbers[:10]:
            assert np.array_equal(ours.labelled(number).labels, its[number]["labels"].numpy())

        times = compare(
            partial(timed, partial(draw, ours.labelled, numbers)),
            partial(timed, partial(draw, its.__getitem__, numbers)),
            rounds=rounds,
        )
        claim = f"random sample, documents of {mean} tokens on average, L {length}"
        peer = f"megatron-core {version}'s GPTDataset without attention masks, {draws:,} samples"
        results.append(result(claim, times, 0.5, peer))
    return results


def draw(get: Callable[[int], Any], numbers: list[int]) -> None:
    for number in numbers:
        get(number)


def write(prefix: Path, lengths: npt.NDArray[np.int32]) -> Path:
    """Write a file of documents of these lengths, with random tokens."""
    with idx_of(prefix).open("wb") as file:
        file.write(Header(np.dtype("<u2"), len(lengths), len(lengths) + 1).pack())
        file.write(lengths.astype("<i4").data)
        file.write((2 * (np.cumsum(lengths, dtype="<i8") - lengths)).data)
        file.write(np.arange(len(lengths) + 1, dtype="<i8").data)
    tokens = np.random.default_rng(1).integers(0, 2**16 - 1, int(lengths.sum()), np.uint16)
    tokens.astype("<u2").tofile(bin_of(prefix))
    return prefix


def theirs(prefix: Path, sequences: int, length: int) -> Any:
    """Return an epoch of all sequences in megatron-core's data set."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset as ItsFile
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=length,
        blend=([str(prefix)], None),
        split="1",
        tokenizer=SimpleNamespace(vocab_size=2**16, pad=-1, eod=0, eos=0, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    numbers = np.arange(sequences, dtype=np.int32)
    return GPTDataset(ItsFile(str(prefix)), str(prefix), numbers, None, Split.train, config)
