"""Packed documents and examples train as each would by itself: loss and every gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.data.batch import Batches, SampleSource
from megapipe.data.dataset import Stream
from megapipe.data.packing import PackedDataset, PackingRule, open_packing
from megapipe.data.supervised import ExampleDataset, count_too_long
from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.data.tokens.format import token_type
from megapipe.distributed.mesh import Grid
from megapipe.layout.resolve import resolve
from megapipe.testing import World, run_world
from tests.parity import reference
from tests.parity.outcome import assemble, own_grads, take_region

L, VOCAB, END = 12, 50, 49
LENGTHS = (5, 30, 2, 13, 8, 3, 7, 4, 20, 6)
"""Number of tokens of each document: one has just those that a sample takes, some have more."""
ROTARY = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
EXAMPLES = {"sample_format": "supervised", "source": "rows.jsonl"}
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {},
        {"model": ROTARY},
        {"pipeline": {"schedule": "seq1f1b", "sequence_slices": 3}},
        {"data": EXAMPLES},
    ],
    4: [
        {"parallel": {"pp": 2, "tp": 2, "sequence_parallel": True}},
        {"parallel": {"pp": 4}, "pipeline": {"schedule": "zb_h1"}},
        {"parallel": {"dp": 2, "tp": 2}, "kernels": {"loss_chunk_tokens": 5}, "model": ROTARY},
        {"parallel": {"pp": 2, "tp": 2}, "model": ROTARY, "data": EXAMPLES},
    ],
}


def document(number: int) -> np.ndarray[Any, Any]:
    """Return a document. End marks are at the ends, and one is within: what was packed says where
    documents are."""
    tokens = np.random.default_rng(number).integers(0, VOCAB - 1, LENGTHS[number])
    tokens[-1] = END
    tokens[len(tokens) // 3] = END
    return tokens


def labels_of(number: int) -> np.ndarray[Any, Any]:
    """Return which tokens of an example are labels: some in the middle, and the last one."""
    chosen = np.random.default_rng(100 + number).random(LENGTHS[number]) < 0.4
    chosen[-1] = True
    return chosen


def settings(case: dict[str, Any]) -> Config:
    model = {"layers": 4, "hidden": 16, "heads": 4, "vocab_size": VOCAB, "dtype": "fp64"}
    base: dict[str, dict[str, Any]] = {
        "model": model,
        "data": {"sample_format": "packed"},
        "optimizer": {"max_grad_norm": None},
        "train": {"steps": 1, "sequence_length": L, "global_batch": 8, "microbatch": 1},
    }
    for section, keys in case.items():
        base[section] = base.get(section, {}) | keys
    return Config.model_validate(base)


def batches(folder: Path, *, supervised: bool) -> Batches:
    file = TokenFile(folder / ("examples" if supervised else "documents"))
    stream = Stream.of(file)
    packing = open_packing(stream, PackingRule(L, cut=not supervised), folder / "cache")
    dataset = PackedDataset(file, packing, L, END)
    if supervised:
        dataset = ExampleDataset(stream, packing, L, END, VOCAB)
        assert count_too_long(stream, L) == 2
    assert len(dataset) <= 9
    source = SampleSource(dataset, lambda draw: draw if draw < len(dataset) else None)
    return Batches([source], vocab_size=VOCAB, mask_document_ends=False, eod=END)


def grads_of(world: World, cases: list[dict[str, Any]], folder: Path) -> list[Any]:
    found = []
    for case in cases:
        config, layout = resolve(settings(case), world.size, VOCAB)
        parallel = config.parallel
        grid = Grid(pp=parallel.pp, dp=parallel.dp or 1, tp=parallel.tp)
        step = TrainStep(config, layout, world.mesh(grid), document_end=END)
        params = reference.init_random(config.model, seed=3)
        step.optimizer.set_weights(
            lambda spec, out, params=params: take_region(params[spec.name], spec, out)
        )
        reduced = step.optimizer.finish_reduce
        grads: list[Any] = []

        def spy(
            scale: float = 1.0, step: Any = step, reduced: Any = reduced, grads: Any = grads
        ) -> Tensor:
            squares: Tensor = reduced(scale)
            grads += own_grads(step.optimizer)
            return squares

        step.optimizer.finish_reduce = spy  # type: ignore[method-assign]
        supervised = config.data.sample_format == "supervised"
        (result,) = step.train(0, batches(folder, supervised=supervised).rows)
        found.append((result.loss, result.tokens, grads))
    return found


def alone(config: Config) -> tuple[float, int, dict[str, Tensor]]:
    """Compute loss, count and gradients over all pieces of all documents, each a batch of its own;
    over the labels of examples that are not too long."""
    supervised = config.data.sample_format == "supervised"
    params = reference.init_random(config.model, seed=3)
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    total, count = torch.zeros((), dtype=torch.float64), 0
    for number in range(len(LENGTHS)):
        if supervised and LENGTHS[number] > L + 1:
            continue
        tokens = torch.from_numpy(document(number))
        chosen = torch.from_numpy(labels_of(number)) if supervised else tokens >= 0
        for start in range(0, len(tokens) - 1, L):
            piece = tokens[start : start + L + 1]
            given, labels = piece[:-1].unsqueeze(0), piece[1:].unsqueeze(0)
            counted = chosen[start + 1 : start + L + 1].double()
            losses = reference.token_losses(leaves, config.model, given, labels)
            total = total + (losses.flatten() * counted).sum()
            count += int(counted.sum())
    grads = torch.autograd.grad(total / count, list(leaves.values()))
    return float(total.detach()) / count, count, dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("world", CASES)
def test_each_document_trains_as_if_it_were_alone(world: int, tmp_path: Path) -> None:
    for name in ("documents", "examples"):
        with TokenWriter(tmp_path / name, token_type(2 * VOCAB), 2 * VOCAB) as writer:
            for number in range(len(LENGTHS)):
                hidden = VOCAB * ~labels_of(number) if name == "examples" else 0
                writer.add(document(number) + hidden)
    ranks = run_world(world, grads_of, CASES[world], tmp_path)
    for i, case in enumerate(CASES[world]):
        config, _ = resolve(settings(case), world, VOCAB)
        loss, tokens, expected = alone(config)
        if config.data.sample_format == "packed":
            assert tokens == sum(length - 1 for length in LENGTHS)
        found = assemble([rank[i][2] for rank in ranks], expected)
        for rank in ranks:
            assert rank[i][:2] == (pytest.approx(loss, rel=1e-12), tokens)
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-13, msg=name)


def logits_of(world: World, tokens: Tensor) -> Any:
    config, layout = resolve(settings({}), world.size, VOCAB)
    step = TrainStep(config, layout, world.mesh(Grid()), document_end=END)
    params = reference.init_random(config.model, seed=3)
    step.optimizer.set_weights(lambda spec, out: take_region(params[spec.name], spec, out))
    step.settle()
    return step.logits(tokens).numpy()


def test_logits_have_positions_of_documents_too() -> None:
    tokens = torch.tensor([[1, 2, END, 3, 4, 5, END, 6]])
    (found,) = run_world(1, logits_of, tokens)
    config, _ = resolve(settings({}), 1, VOCAB)
    params = reference.init_random(config.model, seed=3)
    parts = [
        reference.logits(params, config.model, tokens[:, start:stop])
        for start, stop in ((0, 3), (3, 7), (7, 8))
    ]
    np.testing.assert_allclose(found, torch.cat(parts, dim=1), rtol=1e-10, atol=1e-12)
