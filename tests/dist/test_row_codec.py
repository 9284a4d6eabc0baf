"""Coded rows in dispatch: what is computed is what coding each row by itself leads to.

In fp64 the reference codes the same rows by its own formulas, so that all else has to agree to
1e-10: which rows are coded, with which others, and how often. A run of an fp64 model is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from megapipe.distributed.mesh import Grid
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe.dispatch import Dispatcher
from megapipe.layers.moe.dispatchers.all_gather import AllGatherDispatcher
from megapipe.layers.moe.dispatchers.all_to_all import AllToAllDispatcher
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layers.moe.sharding import MoESharding
from megapipe.layers.moe.specs import Codec, Routing, expert_matrices, of_tokens
from megapipe.ops.activation import Activate
from megapipe.optim.buffers import Bucket, owned_parameters
from megapipe.testing import World, run_world
from tests.parity.bitwise import assert_bitwise, check_groups
from tests.parity.cases import Case
from tests.parity.checking import check_case
from tests.parity.codec_faults import FAULTS
from tests.parity.faults import outcomes_of_faults
from tests.parity.ranks import run_cases
from tests.parity.tiers import in_parts, selected

DATA = Case(dp=2, ep=2, moe="capacity, choice", masked=0.3, layers=2, codec="int8")
TENSOR = Case(
    tp=2, sequence_parallel=True, ep=2, moe="groups", model="llama", layers=2, codec="bf16"
)
CONTEXT = replace(DATA, dp=1, cp=2, moe="top 2", activations="full")
INNER = replace(DATA, ep=1, etp=2, moe="shared, gated", zero=3)
FOLDED = Case(
    dp=2, tp=2, sequence_parallel=True, ep=4, moe="top 2", layers=2, masked=0.3, codec="int8"
)
BOTH = replace(FOLDED, ep=2, etp=2, moe="capacity, choice", zero=2)
GATHERED = {"dispatch": "all_gather"}
TWO_HOPS: dict[str, Any] = {"dispatch": "hierarchical", "node": 2}
CASES = [DATA, replace(TENSOR, **GATHERED), replace(INNER, expert_chunks=3)]


@pytest.mark.full
def test_rows_are_coded_as_by_the_reference() -> None:
    """The parity matrix has more layouts."""
    check_groups([[case] for case in CASES])


NARROW = [
    [replace(DATA, dtype="fp32"), replace(DATA, dtype="fp32", **GATHERED)],
    [
        replace(CONTEXT, dtype="bf16", activations=name)
        for name in ("full", "keep", "experts again")
    ],
    [
        replace(FOLDED, dtype="bf16"),
        *(replace(FOLDED, dtype="bf16", **other) for other in (GATHERED, TWO_HOPS)),
    ],
    [
        replace(BOTH, dtype="fp32", codec="bf16"),
        replace(BOTH, dtype="fp32", codec="bf16", **TWO_HOPS),
    ],
]
"""Groups of forms that have the same bits; a codec rounds what is alike to what is alike."""


@in_parts("world", [2, 4], full=[2])
def test_no_form_changes_a_bit_in_types_that_a_run_may_have(world: int) -> None:
    groups = [group for group in NARROW if group[0].world == world]
    uncoded = [replace(group[0], codec="none") for group in groups]
    cases = [case for group in groups for case in group] + uncoded
    results = run_world(world, run_cases, cases, timeout_s=60 + 10 * len(cases))
    found = dict(zip(cases, map(list, zip(*results, strict=True)), strict=True))
    for (first, *others), plain in zip(groups, uncoded, strict=True):
        for case in others:
            assert_bitwise(found[case], found[first])
        assert found[plain][0].losses[1] != found[first][0].losses[1], "rows are rounded"


HIDDEN, EXPERTS, TOKENS = 8, 4, 12
DISPATCHERS: list[Callable[..., Dispatcher]] = [
    AllToAllDispatcher,
    AllGatherDispatcher,
    partial(AllToAllDispatcher, chunks=2),
]


def in_steps(seed: int) -> Tensor:
    """Return tokens [s, 1, h] that no codec rounds: whole numbers, the largest of which is 127."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-126, 127, (TOKENS, 1, HIDDEN), generator=generator).float()
    x[..., seed % HIDDEN] = 127.0
    return x


class NoActivation(Activate):
    """Gives what it is given."""

    def __call__(self, y: Tensor) -> Tensor:
        return y.clone()


def of_one_layer(
    world: World, kind: Callable[..., Dispatcher], codec: Codec, x: Tensor, grad: Tensor
) -> list[Tensor]:
    """Return output and gradients of experts that permute the values of their tokens."""
    mesh = world.mesh(Grid(1, 2, 1, 1, 2))
    dispatcher = kind(mesh.ep, codec=codec)
    sharding = MoESharding(mesh.tp, False, torch.float32, dispatcher=dispatcher)
    shape = EXPERTS, HIDDEN, HIDDEN
    up, down = (
        (next(expert_matrices(name, shape, bias=False, std=1, inner_dim=dim)), None)
        for name, dim in (("up", 1), ("down", 2))
    )
    router = of_tokens("router", (EXPERTS, HIDDEN), 1.0)
    layer = RoutedExperts(sharding, 0, Routing(EXPERTS, 1), NoActivation("none"), router, up, down)
    bucket = Bucket(0, list(owned_parameters(layer)), mesh.dp, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for entry in bucket.entries:
        weights = bucket.view(bucket.weights, entry)
        if entry.spec.over_ep:
            for expert, matrix in enumerate(weights):
                turned = torch.randperm(HIDDEN, generator=generator).roll(world.rank + expert)
                matrix.copy_(torch.eye(HIDDEN)[turned])
        else:
            weights.copy_(torch.randn(weights.shape, generator=generator))
    x = x.clone().requires_grad_()
    queue = sharding.queue
    queue.open(0)
    y = layer(x, MicroBatch(0, 0, 1))
    y.backward(grad)
    queue.run(0)
    assert x.grad is not None
    return [y.detach(), x.grad, bucket.grads[0].clone()]


def run_layers(world: World) -> list[tuple[int, bool, list[list[Tensor]]]]:
    """Return what each codec leaves, by dispatcher and whether values are in whole steps."""
    x, grad = in_steps(3 + world.rank), in_steps(5 + world.rank)
    found = []
    for number, kind in enumerate(DISPATCHERS):
        for exact in (True, False):
            given = (x, grad) if exact else (x / 3 + 0.1, grad / 7)
            each = [of_one_layer(world, kind, codec, *given) for codec in get_args(Codec)]
            found.append((number, exact, each))
    return found


@pytest.mark.full
def test_what_codecs_can_hold_arrives_as_it_was() -> None:
    """There and back, in F and in I: whole layers have the same bits, and others have not."""
    for rank in run_world(2, run_layers):
        for number, exact, (none, *others) in rank:
            for other in others:
                same = [a.equal(b) for a, b in zip(none, other, strict=True)]
                assert same == [exact] * 3, DISPATCHERS[number]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return outcomes_of_faults(selected(request, "fault", FAULTS))


@in_parts("fault", FAULTS, full=2, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Any, outcomes: dict[str, list[Any]]) -> None:
    with pytest.raises(AssertionError, match="difference is"):
        check_case(FAULTS[fault], outcomes[fault.__name__])
