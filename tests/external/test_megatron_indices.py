"""Indices and samples equal those of megatron-core: GPTDataset, BlendedDataset, their builder and
its compiled helpers. Runs if megatron-core is installed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.cli import parse
from megapipe.data.build import build_batches
from megapipe.data.dataset import Sample
from megapipe.data.indices import (
    Blend,
    BlendSizes,
    EpochCounts,
    IndexedDataset,
    Request,
    blend_index,
    open_indices,
    sample_index,
)
from megapipe.data.sources import load_sources
from megapipe.data.split import split_ranges
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.data.tokens import TokenFile, TokenWriter
from tests.external.megatron_datasets import dataset_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets import helpers, helpers_cpp
    from megatron.core.datasets.blended_dataset import BlendedDataset as TheirBlend
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.indexed_dataset import IndexedDataset as TheirFile
    from megatron.core.datasets.utils import Split

LENGTHS = {
    "usual": lambda random: random.geometric(0.05, 150),
    "single tokens": lambda random: np.ones(400, np.int64),
    "many empty": lambda random: random.integers(0, 3, 300),
    "two sizes": lambda random: random.choice([1, 90], 120),
    "one": lambda random: np.array([700]),
}


def write(prefix: Path, lengths: np.ndarray) -> Path:
    """Write a file with a document of random tokens for each length."""
    random = np.random.default_rng(len(lengths))
    with TokenWriter(prefix, np.dtype("<u2")) as writer:
        for length in lengths:
            writer.write(random.integers(0, 60000, length))
            writer.close_sequences(np.array([length], np.int32), np.array([1]))
    return prefix


class Blended:
    """The data sets in the order of a blend."""

    def __init__(self, datasets: list[IndexedDataset], blend: Blend) -> None:
        self.datasets, self.blend = datasets, blend

    def __len__(self) -> int:
        return len(self.blend)

    def labelled(self, index: int) -> Sample:
        source, number = self.blend(index)
        return self.datasets[source].labelled(number)


@pytest.fixture(params=LENGTHS)
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "x", LENGTHS[request.param](np.random.default_rng(0)))


def same_samples(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for number in {*np.linspace(0, len(theirs), 50, endpoint=False, dtype=np.int64).tolist()}:
        sample, expected = ours.labelled(number), theirs[number]
        counted = expected["loss_mask"].numpy() == 1
        assert np.array_equal(sample.labels, expected["labels"].numpy()[counted])
        assert np.array_equal(sample.tokens, expected["tokens"].numpy()[: len(sample.tokens)])
        assert not counted[len(sample.labels) :].any()


def test_indices_and_samples(prefix: Path, tmp_path: Path) -> None:
    file, low = TokenFile(prefix), TheirFile(str(prefix))
    seen = set()
    random = np.random.default_rng(1)
    for number, sequence_length in enumerate([2, 8, 64, 8, 2, 64, 8, 8, 2, 64]):
        seed = int(random.integers(2**32))
        sequences = range(len(file.lengths))
        if number % 4 == 0 and len(sequences) > 1:
            sequences = split_ranges("70,20,10", len(sequences))[0]
        tokens = int(file.lengths[sequences.start : sequences.stop].sum())
        epoch = (tokens - 1) // sequence_length
        wanted = [None, epoch * 3 + epoch // 4 + 1, epoch, 2 * epoch + epoch * 9 // 10 + 2, 1][
            number % 5
        ]
        keep_last = number % 3 == 1
        given = dataset_config(
            seed, sequence_length, drop_last_partial_validation_sequence=not keep_last
        )
        split = Split.valid if keep_last else Split.train
        request = Request(sequences, sequence_length, wanted, seed, keep_last)
        found = open_indices(file, request, tmp_path / "cache")
        apart = EpochCounts.of(tokens, sequence_length, wanted, keep_last=keep_last).apart
        seen.add(apart is not None)
        ids = np.arange(sequences.start, sequences.stop, dtype=np.int32)
        try:
            theirs = GPTDataset(low, str(prefix), ids, wanted, split, given)
        except AssertionError:  # it refuses a last document that is empty where the last is kept
            assert keep_last
            assert found.samples[-1][1] == -1
            continue
        for ours, its in zip(
            (found.documents[:], found.samples[:], found.shuffle[:]),
            (theirs.document_index, theirs.sample_index, theirs.shuffle_index),
            strict=True,
        ):
            assert ours.dtype == its.dtype
            assert np.array_equal(ours, its)
        same_samples(IndexedDataset(file, found, sequence_length), theirs)
    assert seen == {False, True}


def test_the_compiled_sample_index() -> None:
    """Small cases of all kinds, and lengths whose sums int32 cannot hold."""
    random = np.random.default_rng(2)
    for number in range(1000):
        kind = list(LENGTHS)[number % len(LENGTHS)]
        lengths = LENGTHS[kind](random)[: int(random.integers(1, 60))].astype(np.int32)
        sequence_length, epochs = int(random.integers(2, 40)), int(random.integers(1, 5))
        if number % 50 == 0:
            lengths = (lengths.astype(np.int64) * 2**24).clip(0, 2**31 - 1).astype(np.int32)
            sequence_length = int(random.integers(2**18, 2**31 - 1))
        tokens = int(lengths.sum(dtype=np.int64))
        documents = np.tile(np.arange(len(lengths), dtype=np.int32), epochs)
        random.shuffle(documents)
        for drop_last in (True, False):
            if tokens < 2:
                continue
            given = (lengths, documents, sequence_length, epochs, tokens, drop_last, 1)
            its = helpers_cpp.build_sample_idx_int32(*given)
            ours = sample_index(lengths, documents, sequence_length, len(its) - 1)
            assert ours.dtype == its.dtype
            assert np.array_equal(ours, its)
            wanted = ((epochs * tokens - 1) // sequence_length) or None
            if epochs == 1 and (wanted or not drop_last):
                counts = EpochCounts.of(tokens, sequence_length, wanted, keep_last=not drop_last)
                assert counts.samples == len(its) - 1


def test_the_compiled_blends() -> None:
    random = np.random.default_rng(5)
    for number in range(60):
        sources = (2, 3, 7, 1, 40)[number % 5]
        weights = [random.random, np.ones, lambda n: 10.0 ** -random.integers(0, 6, n)][number % 3]
        shares = BlendSizes.weighted(weights(sources) + 1e-9, 100).shares
        size = int(random.integers(0, 20000))
        its = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers.build_blending_indices(*its, shares, sources, size, False)
        for ours, expected in zip(blend_index(shares, size), its, strict=True):
            assert ours.dtype == expected.dtype
            assert np.array_equal(ours, expected)


def test_splits() -> None:
    random = np.random.default_rng(3)
    for text in ("969,30,1", "1", "0,1", "99, 1 ,0", "0,0,5", ".5,.25,0.25", "1,1,1"):
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
        for sequences in [0, 1, 2, 5, *random.integers(6, 10**9, 50).tolist()]:
            for ours, ends in zip(split_ranges(text, sequences), matrix, strict=True):
                if ends is None:
                    assert not ours
                else:
                    assert ours == range(*(round(end * float(sequences)) for end in ends))


SIZES = (300, 40, 10)


@pytest.mark.parametrize(
    "weights", [[0.3, 0.7], [5.0, 1.0, 1.0], [3.0, 1.0, 0.5, 9.0, 2.0, 0.1, 1.7], None]
)
def test_blends_of_files(tmp_path: Path, weights: list[float] | None) -> None:
    """All of it: splits, requests, indices, blend and samples."""
    random = np.random.default_rng(4)
    sources = 3 if weights is None else len(weights)
    prefixes = [write(tmp_path / f"{i}", random.geometric(0.03, 90 + i)) for i in range(sources)]
    given = dataset_config(7, 16, blend=([str(p) for p in prefixes], weights), split="80,15,5")
    builder = BlendedMegatronDatasetBuilder(GPTDataset, list(SIZES), lambda: True, given)
    for split, (theirs, size) in enumerate(zip(builder.build(), SIZES, strict=True)):
        assert isinstance(theirs, TheirBlend)
        plan = None if weights is None else BlendSizes.weighted(weights, size)
        datasets = []
        for number, prefix in enumerate(prefixes):
            file = TokenFile(prefix)
            sequences = split_ranges("80,15,5", len(file.lengths))[split]
            wanted = None if plan is None else plan.requests[number]
            found = open_indices(file, Request(sequences, 16, wanted, 7), tmp_path / "cache")
            datasets.append(IndexedDataset(file, found, 16))
        if plan is None:
            plan = BlendSizes.by_size([len(dataset) for dataset in datasets], size)
        index = blend_index(plan.shares, plan.size)
        assert np.array_equal(index[0], theirs.dataset_index)
        assert np.array_equal(index[1], theirs.dataset_sample_index)
        same_samples(Blended(datasets, Blend(index, sources)), theirs)


@pytest.mark.parametrize("weights", [None, [1.0], [2.0, 1.0, 0.25], []])
def test_batches_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: list[float] | None
) -> None:
    """A configuration sets the data: one file, a blend with weights, or a blend without."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(5)
    names = ["a"] if weights is None else ["a", "b", "c"][: len(weights) or 3]
    for number, name in enumerate(names):
        write(Path(name), random.geometric(0.03, 90 + number))
    steps, batch = (9, 8) if weights else (5, 6)
    keys = [
        *("train.sequence_length=16", f"train.steps={steps}", f"train.global_batch={batch}"),
        *(
            "run.seed=7",
            "data.sample_format=megatron",
            "data.split=80,15,5",
            "model.vocab_size=65536",
        ),
    ]
    if weights is None:
        keys.append("data.source=a")
    for number, name in enumerate(names if weights is not None else []):
        keys.append(f"data.mixture.{name}.source={name}")
        keys += [f"data.mixture.{name}.weight={weights[number]}"] if weights else []
    chosen = parse(keys).config
    training, _ = build_batches(chosen, ByteTokenizer(), load_sources(chosen, ByteTokenizer()))
    given = dataset_config(7, 16, blend=(names, weights or None), split="80,15,5")
    sizes = [steps * batch, 1, 1]
    theirs = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, given).build()[0]
    rows = training.rows(range(steps * batch))
    for number in range(steps * batch):
        expected = theirs[number]
        assert np.array_equal(rows.tokens[number], expected["tokens"])
        assert np.array_equal(rows.labels[number], expected["labels"])
    assert sum(training.taken(steps * batch)) == (steps * batch if weights is not None else 0)
    for samples in (0, 1, 7, steps * batch):
        counts = [0] * len(names)
        for number in range(samples if weights is not None else 0):
            origin = training.origin(number)
            assert origin is not None
            counts[names.index(origin.source)] += 1
        assert training.taken(samples) == (counts if weights is not None else [])
