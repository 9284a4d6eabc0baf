"""Each tensor-parallel layer against plain torch on full tensors: tp 1, 2, 4, in fp64.

Every check runs on every rank of a world of four, for each tp with and without sequence
parallelism, and compares the rank's own part of outputs, input gradients and main gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megapipe.checkpoint.regions import Region, intersect, whole
from megapipe.config.model import ModelConfig
from megapipe.context.positions import Positions
from megapipe.distributed.collectives import (
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_reduce,
)
from megapipe.distributed.mesh import Axis, Grid, ParallelMesh
from megapipe.layers.activation_policy import padded_vocabulary
from megapipe.layers.cross_entropy import vocab_parallel_cross_entropy
from megapipe.layers.embedding import PositionEmbedding, WordEmbedding
from megapipe.layers.linear import ColumnParallelLinear, RowParallelLinear
from megapipe.layers.linear_cross_entropy import linear_cross_entropy
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import Sharding, spec_of
from megapipe.layers.specs import by_name, column_linear, positions, row_linear, vocabulary
from megapipe.layers.weight_grad import main_grad
from megapipe.model.gpt.attention import Attention
from megapipe.model.gpt.parameters import block_parameters
from megapipe.testing import GROUP_TIMEOUT_S, World, run_world
from tests.parity.collective_recorder import Call, recording
from tests.parity.ranks import take_region
from tests.parity.split_layers import by_sequence, give_values, part

S, B, VOCAB, HIDDEN = 8, 3, 300, 12
TPS = (1, 2, 4)


def make_shardings(world: World) -> list[Sharding]:
    world.restart()
    device = torch.device("cpu")
    grids = [Grid(dp=4 // tp, tp=tp) for tp in TPS]
    axes = [ParallelMesh(grid, device=device, timeout_s=GROUP_TIMEOUT_S).tp for grid in grids]
    return [Sharding(tp, split, torch.float64) for tp in axes for split in (False, True)]


def randn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}"
    )


def assert_main_grads(module: nn.Module, expected: dict[str, Tensor], sharding: Sharding) -> None:
    """Check that each main gradient is its region of the full one, and zero in the padding."""
    for parameter in module.parameters():
        spec, grad = spec_of(parameter), main_grad(parameter)
        if spec.grad_is_partial:
            grad = all_reduce(grad.clone(), sharding.tp)
        padded = torch.zeros(spec.sizes, dtype=grad.dtype)
        take_region(expected[spec.name], spec, padded)
        assert_close(grad, padded, spec.name)


def backward(y: Tensor, grad: Tensor, module: nn.Module, sharding: Sharding) -> None:
    """Run ``I``, at which no weight gradient is computed, then ``W``."""
    sharding.queue.open(0)
    torch.autograd.backward([y], [grad])
    assert not any(main_grad(p).any() for p in module.parameters()), "deferred to W"
    with torch.no_grad():
        sharding.queue.run(0)
    assert not sharding.queue.pending()


def check_linear(shardings: list[Sharding]) -> None:
    for sharding in shardings:
        for shape in ((16, HIDDEN), (2, 8, HIDDEN)):
            for bias in (False, True):
                check_column(sharding, shape, bias)
        for bias in (False, True):
            check_row(sharding, bias)


def plain_linear(
    shape: tuple[int, ...], bias: bool, apply: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    """Run a full linear layer, and return x, its output, the full parameters, and an output
    gradient; the gradients are in ``.grad``."""
    x = randn(S, B, shape[-1], seed=1).requires_grad_()
    full = {"a.weight": randn(*shape, seed=2).requires_grad_()}
    if bias:
        full["a.bias"] = randn(*shape[:-1], seed=3).requires_grad_()
    y = apply(x, full["a.weight"], full.get("a.bias"))
    grad = randn(*y.shape, seed=4)
    y.backward(grad)
    return x, y.detach(), full, grad


def grads(full: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.grad for name, tensor in full.items() if tensor.grad is not None}


def check_column(sharding: Sharding, shape: tuple[int, ...], bias: bool) -> None:
    """Check outputs that are split over tp within each of the k matrices of a 3-D weight."""

    def apply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.einsum("sbi,...oi->sb...o", x, weight)  # [s, b, (k,) out]
        return y if bias is None else y + bias

    x, y, full, grad = plain_linear(shape, bias, apply)
    layer = ColumnParallelLinear(sharding, *column_linear("a", shape, bias=bias, std=0.1))
    give_values(layer, {name: tensor.detach() for name, tensor in full.items()})
    here = by_sequence(x.detach(), sharding).clone().requires_grad_()
    out = layer(here)
    assert_close(out, part(y, sharding.tp, -1).reshape(S, B, -1), "output")
    backward(out, part(grad, sharding.tp, -1).reshape(S, B, -1), layer, sharding)
    assert x.grad is not None
    assert here.grad is not None
    assert_close(here.grad, by_sequence(x.grad, sharding), "input gradient")
    assert_main_grads(layer, grads(full), sharding)


def check_row(sharding: Sharding, bias: bool) -> None:
    """Check inputs that are split over tp; the output is whole, or split by sequence."""
    x, y, full, grad = plain_linear((HIDDEN, 16), bias, functional.linear)
    layer = RowParallelLinear(sharding, *row_linear("a", (HIDDEN, 16), bias=bias, std=0.1))
    give_values(layer, {name: tensor.detach() for name, tensor in full.items()})
    here = part(x.detach(), sharding.tp, -1).clone().requires_grad_()
    out = layer(here)
    assert_close(out, by_sequence(y, sharding), "output")
    backward(out, by_sequence(grad, sharding), layer, sharding)
    assert x.grad is not None
    assert here.grad is not None
    assert_close(here.grad, part(x.grad, sharding.tp, -1), "input gradient")
    assert_main_grads(layer, grads(full), sharding)


def check_embedding(shardings: list[Sharding]) -> int:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCAB, (B, S), generator=generator)
    tokens[0, :3] = torch.tensor([0, VOCAB - 1, VOCAB - 1])
    firsts = [padded_vocabulary(VOCAB, tp) // tp for tp in (2, 4)]  # rows of the second rank
    tokens[1, :4] = torch.tensor([row - past for row in firsts for past in (0, 1)])
    full = {
        "embedding.word.weight": randn(VOCAB, HIDDEN, seed=6).requires_grad_(),
        "embedding.position.weight": randn(S + 2, HIDDEN, seed=7).requires_grad_(),
    }
    word, position = full.values()
    y = (functional.embedding(tokens, word) + position[:S]).transpose(0, 1)
    grad = randn(S, B, HIDDEN, seed=8)
    y.backward(grad)
    only_padding = 0
    for sharding in shardings:
        layer = nn.Sequential(
            WordEmbedding(
                sharding,
                vocabulary("embedding.word.weight", VOCAB, HIDDEN, role="embedding", std=0.1),
            ),
            PositionEmbedding(
                sharding, positions("embedding.position.weight", S + 2, HIDDEN, std=0.1)
            ),
        )
        give_values(layer, {name: tensor.detach() for name, tensor in full.items()})
        out = layer[1](layer[0](tokens), Positions.whole(S))
        assert_close(out, by_sequence(y.detach(), sharding), "output")
        backward(out, by_sequence(grad, sharding), layer, sharding)
        assert_main_grads(layer, grads(full), sharding)
        spec = spec_of(layer[0].weight)
        only_padding += intersect(Region(spec.offsets, spec.sizes), whole(spec.shape)) is None
    return only_padding


def check_cross_entropy(shardings: list[Sharding]) -> list[Tensor]:
    labels = 13 * torch.arange(S * B).view(S, B) % VOCAB
    logits = (3 * randn(S, B, VOCAB, seed=9) + 1e4).requires_grad_()  # exp would overflow
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    grad = randn(S, B, seed=10)
    losses.backward(grad.flatten())
    assert logits.grad is not None
    seen = []
    for sharding in shardings:
        tp = sharding.tp
        padded = padded_vocabulary(VOCAB, tp.size)
        columns = slice(tp.index * padded // tp.size, (tp.index + 1) * padded // tp.size)
        full = torch.cat((logits.detach(), 1e6 + randn(S, B, padded - VOCAB, seed=11)), -1)
        wanted = torch.cat((logits.grad, torch.zeros(S, B, padded - VOCAB)), -1)
        local = full[..., columns].clone().requires_grad_()
        kept = local.detach().clone()
        with recording() as recorder:
            out = vocab_parallel_cross_entropy(local, labels, tp, VOCAB)
            forward = recorder.exchanged()
            out.backward(grad)
        assert_close(out, losses.detach().view(S, B), "losses")
        assert local.grad is not None
        assert_close(local.grad, wanted[..., columns], "gradient, zero in the padding")
        assert local.detach().equal(kept), "the logits are left alone"
        exchanges = [("all_gather", 3 * tp.size * S * B)] if tp.size > 1 else []
        assert forward == exchanges, "three numbers per token and rank, no logits"
        assert recorder.exchanged() == forward, "backward communicates nothing"
        seen.append(out.detach())

        half = kept.bfloat16().requires_grad_()
        out = vocab_parallel_cross_entropy(half, labels, tp, VOCAB)
        out.sum().backward()
        assert out.dtype == torch.float32
        assert half.grad is not None
        assert half.grad.dtype == torch.bfloat16
    return seen


CHUNKS = (1, 5, S * B, 100)
"""Tokens at a time: one, some with a shorter rest, all, more than all."""


def check_linear_cross_entropy(shardings: list[Sharding]) -> list[Tensor]:
    """Check head and loss in chunks against torch's on full logits. Some tokens are masked; one of
    their labels is padding and one none at all."""
    labels = 13 * torch.arange(S * B).view(S, B) % VOCAB
    mask = torch.arange(S * B).view(S, B) % 4 > 0
    hidden = (3 * randn(S, B, HIDDEN, seed=12)).requires_grad_()
    full = {"head.weight": randn(VOCAB, HIDDEN, seed=13).requires_grad_()}
    logits = functional.linear(hidden, full["head.weight"])
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    expected = losses[mask.flatten()].sum()
    expected.backward(torch.tensor(0.7, dtype=torch.float64))
    assert hidden.grad is not None
    labels = labels.clone()
    labels[0, 0], labels[4, 0] = VOCAB, -100
    assert not mask[0, 0]
    assert not mask[4, 0]
    seen = []
    for sharding, chunk in itertools.product(shardings, CHUNKS):
        tp = sharding.tp
        head = ColumnParallelLinear(
            sharding, vocabulary("head.weight", VOCAB, HIDDEN, role="head", std=0.1)
        )
        give_values(head, {name: tensor.detach() for name, tensor in full.items()})
        here = by_sequence(hidden.detach(), sharding).clone().requires_grad_()

        def loss(
            here: Tensor = here, head: ColumnParallelLinear = head, chunk: int = chunk
        ) -> Tensor:
            return linear_cross_entropy(here, head, labels, mask, vocab_size=VOCAB, chunk=chunk)

        with torch.no_grad():
            evaluated = loss()
        assert_close(evaluated, expected.detach(), "loss without a graph")
        assert not main_grad(head.weight).any()
        with recording() as recorder:
            total = loss()
            assert total.isnan()
            assert not recorder.calls
            sharding.queue.open(0)
            total.backward(torch.tensor(0.7, dtype=torch.float64))
        assert sharding.queue.pending() == {0: []}, "all is done within I"
        sharding.queue.clear()
        assert_close(total, expected.detach(), "loss")
        assert total.equal(evaluated), "bitwise the same with and without a graph"
        assert here.grad is not None
        assert_close(here.grad, by_sequence(hidden.grad, sharding), "input gradient")
        assert_main_grads(head, grads(full), sharding)
        n = min(chunk, S * B)
        counts = [("all_gather", 3 * tp.size * min(n, S * B - i)) for i in range(0, S * B, n)]
        elements = S * B * HIDDEN
        if sharding.sequence_split:
            counts = [("all_gather", elements), *counts, ("reduce_scatter", elements)]
        else:
            counts.append(("all_reduce", elements))
        assert recorder.exchanged() == (counts if tp.size > 1 else [])
        seen.append(total.detach())
    return seen


def calls_recorded(axis: Axis) -> list[Call]:
    """Return what the recorder says of known calls: one is hidden by a product."""
    x = torch.zeros(8, 2)
    with recording() as recorder:
        all_gather(x, axis)
        wait = start_all_reduce(x, axis)
        x.t() @ x
        wait()
        reduce_scatter(x, axis)
    return recorder.calls


ATTENTION = {
    "layers": 1,
    "hidden": HIDDEN,
    "heads": 8,
    "head_dim": 4,
    "max_positions": S,
    "vocab_size": VOCAB,
    "ffn_hidden": 8,
}


def plain_attention(x: Tensor, full: dict[str, Tensor], model: ModelConfig) -> Tensor:
    """Compute causal attention with explicit scores; rows of qkv come by key/value head."""
    assert model.kv_heads is not None
    d, queries = model.head_dim, model.heads // model.kv_heads
    name = "layers.0.attention"
    qkv = functional.linear(x, full[f"{name}.qkv.weight"], full[f"{name}.qkv.bias"])
    outputs = []
    for group in qkv.split((queries + 2) * d, dim=-1):
        *heads, k, v = group.split(d, dim=-1)  # each [s, b, d]
        for q in heads:
            scores = torch.einsum("sbd,tbd->bst", q, k) / d**0.5
            future = torch.ones(S, S, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("bst,tbd->sbd", weights, v))
    y = torch.cat(outputs, dim=-1)
    return functional.linear(y, full[f"{name}.out.weight"], full[f"{name}.out.bias"])


def check_attention(shardings: list[Sharding]) -> list[tuple[int, ...]]:
    """Check grouped-query attention: a rank's rows are whole groups of heads."""
    rows = []
    for kv_heads in (4, 8):
        model = ModelConfig.model_validate({**ATTENTION, "kv_heads": kv_heads})
        qkv_rows = (8 + 2 * kv_heads) * 4
        full = {
            "layers.0.attention.qkv.weight": randn(qkv_rows, HIDDEN, seed=1),
            "layers.0.attention.qkv.bias": randn(qkv_rows, seed=2),
            "layers.0.attention.out.weight": randn(HIDDEN, 32, seed=3),
            "layers.0.attention.out.bias": randn(HIDDEN, seed=4),
        }
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in full.items()}
        x = randn(S, B, HIDDEN, seed=5).requires_grad_()
        y = plain_attention(x, leaves, model)
        grad = randn(*y.shape, seed=6)
        y.backward(grad)
        assert x.grad is not None
        for sharding in shardings:
            layer = Attention(sharding, model, 0, by_name(block_parameters(model, 0)))
            give_values(layer, full)
            here = by_sequence(x.detach(), sharding).clone().requires_grad_()
            out = layer(layer.qkv(here), MicroBatch(index=0, step=0, seed=0), None)
            assert_close(out, by_sequence(y.detach(), sharding), "output")
            backward(out, by_sequence(grad, sharding), layer, sharding)
            assert here.grad is not None
            assert_close(here.grad, by_sequence(x.grad, sharding), "input gradient")
            assert_main_grads(layer, grads(leaves), sharding)
            rows.append(tuple(layer.qkv.weight.shape))
    return rows


@dataclass
class Seen:
    """What the checks of one rank leave to be compared with the other ranks'."""

    only_padding: int
    losses: list[Tensor]
    recorded: list[Call]
    qkv_shapes: list[tuple[int, ...]]


def check_layers(world: World) -> Seen:
    shardings = make_shardings(world)
    check_linear(shardings)
    return Seen(
        only_padding=check_embedding(shardings),
        losses=[*check_cross_entropy(shardings), *check_linear_cross_entropy(shardings)],
        recorded=calls_recorded(shardings[-1].tp),
        qkv_shapes=check_attention(shardings),
    )


@pytest.fixture(scope="module")
def ranks() -> list[Seen]:
    """Run the checks: a failing one shows as an error with its rank and traceback."""
    return run_world(4, check_layers)


@pytest.mark.full
def test_some_ranks_hold_padding_alone(ranks: list[Seen]) -> None:
    """At tp 4 the vocabulary of 300 is padded to 512: the last rank has none of it."""
    assert [seen.only_padding for seen in ranks] == [0, 0, 0, 2]


def test_token_losses_are_bitwise_the_same_on_all_ranks(ranks: list[Seen]) -> None:
    for results in zip(*(seen.losses for seen in ranks), strict=True):
        assert all(losses.equal(results[0]) for losses in results)


def test_the_recorder_sees_every_collective(ranks: list[Seen]) -> None:
    for seen in ranks:
        assert seen.recorded == [
            Call("all_gather", 64),
            Call("all_reduce", 16, exposed=False),
            Call("reduce_scatter", 16),
        ]


def test_a_rank_holds_whole_groups_of_heads(ranks: list[Seen]) -> None:
    grouped = [(64 // tp, HIDDEN) for tp in TPS for _ in range(2)]
    plain = [(96 // tp, HIDDEN) for tp in TPS for _ in range(2)]
    assert all(seen.qkv_shapes == grouped + plain for seen in ranks)


@pytest.mark.parametrize(("tp", "padded"), [(1, 384), (2, 512), (4, 512)])
def test_padding_of_the_test_vocabulary(tp: int, padded: int) -> None:
    assert padded_vocabulary(VOCAB, tp) == padded
