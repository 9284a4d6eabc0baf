"""Equal results on a CUDA device: one process, several that share the GPU, all ranks in one
process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megapipe import TrainStep
from megapipe.distributed.mesh import Axis, Grid
from megapipe.engine.recorder import Recorder
from megapipe.layers.linear import ColumnParallelLinear
from megapipe.layers.parameter import LocalParameter, Sharding
from megapipe.layers.rng import draw_normal, seeded
from megapipe.layers.specs import column_linear
from megapipe.layers.weight_grad import add_product, main_grad
from megapipe.optim.buffers import Bucket, owned_parameters
from megapipe.schedule.ir import Kind, Op
from megapipe.testing import World, run_world
from tests.parity import reference
from tests.parity.checking import kind_of
from tests.parity.ranks import (
    Case,
    Outcome,
    Rows,
    assemble,
    batch_of,
    check_case,
    configure,
    plain,
    run_cases,
    take_region,
)

DEVICE = "cuda"
TIMEOUT_S = 300.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHARED = Case(
    dp=2, tp=2, pp=2, m=4, schedule="zb_h1", sequence_parallel=True, masked=0.3, debug=True
)
"""Eight gloo processes on one GPU: their messages go through host memory."""
IN_PROCESS = Case(pp=4, m=6, schedule="zb_h1", in_process=True, masked=0.3)
SLICED = replace(IN_PROCESS, schedule="seq1f1b", slices=3)
EXACT = [
    [Case(masked=0.3), Case(model="llama", tied=False, kv_heads=2), Case(zero=0, clip=None)],
    [
        SHARED,
        replace(SHARED, model="llama", tied=False, schedule="1f1b", zero=0),
        replace(SHARED, schedule="dualpipe"),
        replace(SHARED, schedule="seq1f1b", slices=2, model="llama", kv_heads=2, debug=False),
    ],
    [
        IN_PROCESS,
        replace(IN_PROCESS, schedule="1f1b", tied=False),
        replace(IN_PROCESS, pp=2, chunks=2, schedule="interleaved_1f1b"),
        SLICED,
        replace(SLICED, model="llama", tied=False, kv_heads=2),
        replace(IN_PROCESS, schedule="varuna"),
        replace(IN_PROCESS, schedule="chimera_backward_halving"),
    ],
]
IDS = ["one process", "eight processes", "in process"]
WITH_EXPERTS = [
    [
        Case(moe="top 2", model="llama", masked=0.3),
        Case(moe="capacity, score", activations="full"),
    ],
    [
        replace(SHARED, moe="groups", ep=2, model="llama", tied=False),
        replace(SHARED, moe="capacity, choice", ep=2, etp=2, dispatch="fetch", debug=False),
        replace(SHARED, moe="top 2", ep=2, expert_chunks=2, schedule="dualpipe", debug=False),
    ],
    [replace(IN_PROCESS, moe="shared, gated"), replace(IN_PROCESS, moe="random", schedule="1f1b")],
]


def on_gpu(cases: list[Case]) -> list[list[Outcome]]:
    """Return, for each case, the outcomes of all ranks."""
    ranks = run_world(cases[0].world, run_cases, cases, DEVICE, timeout_s=TIMEOUT_S)
    return [[outcomes[i] for outcomes in ranks] for i in range(len(cases))]


@pytest.mark.parametrize("cases", EXACT, ids=IDS)
def test_fp64_is_the_reference_s(cases: list[Case]) -> None:
    """Loss, gradients, norm, weights and validation loss."""
    for case, outcomes in zip(cases, on_gpu(cases), strict=True):
        check_case(case, outcomes)


@pytest.mark.parametrize("cases", WITH_EXPERTS, ids=IDS)
def test_experts_in_fp64(cases: list[Case]) -> None:
    """Also counts, dropped choices, and the auxiliary losses."""
    for case, outcomes in zip(cases, on_gpu(cases), strict=True):
        check_case(case, outcomes)


def test_experts_in_bf16() -> None:
    """The reference uses the run's choices, and these fit the scores."""
    case = Case(moe="top 2", model="llama", dtype="bf16")
    ((outcome,),) = on_gpu([case])
    check_case(case, [outcome])


def test_compiled_blocks() -> None:
    """inductor's code for the device, in fp64: whole blocks, and the parts around experts."""
    cases = [Case(compile=True), Case(compile=True, moe="groups", model="llama", masked=0.3)]
    for case, outcomes in zip(cases, on_gpu(cases), strict=True):
        check_case(case, outcomes)


@pytest.mark.parametrize("cases", EXACT, ids=IDS)
def test_bf16_is_as_close_to_fp32_as_a_single_process(cases: list[Case]) -> None:
    """Gradients of the first step: at most twice the error of plain single-process bf16."""
    cases = [replace(case, dtype="bf16") for case in cases]
    for case, outcomes in zip(cases, on_gpu(cases), strict=True):
        model = configure(plain(case))[0].model
        params = reference.init_random(model, seed=3)
        batch = batch_of(plain(case), 0)
        exact_model = model.model_copy(update={"dtype": "fp32"})
        loss, exact = reference.loss_and_grads(params, exact_model, batch)
        _, baseline = reference.loss_and_grads(params, model, batch)
        actual = assemble([outcome.grads[0] for outcome in outcomes], exact)
        reference.assert_error_like(actual, baseline, exact, kind=kind_of)
        assert abs(outcomes[0].losses[0] - loss) < 0.02


def run_deterministically(world: World, cases: list[Case]) -> list[Outcome]:
    """Run every case twice, in one process, with deterministic kernels only."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts
    torch.use_deterministic_algorithms(True)
    return run_cases(world, [*cases, *cases], DEVICE)


def test_deterministic_runs_are_bitwise_equal() -> None:
    """There are enough equal tokens to reveal atomic additions into the embedding, or of experts'
    rows into tokens."""
    base = Case(in_process=True, pp=2, m=4, batch=8, sequence=64, vocab=5, dropout=0.1)
    sliced = replace(base, schedule="seq1f1b", slices=2)
    experts = replace(base, model="llama", moe="capacity, score")
    these = (base, sliced, experts, replace(experts, moe="top 2"))
    cases = [replace(case, dtype=dtype) for case in these for dtype in ("fp32", "bf16")]
    (outcomes,) = run_world(1, run_deterministically, cases, timeout_s=TIMEOUT_S)
    for first, second in zip(outcomes[: len(cases)], outcomes[len(cases) :], strict=True):
        assert first.losses == second.losses
        assert first.norms == second.norms
        for a, b in zip(
            (*first.grads, *first.copies), (*second.grads, *second.copies), strict=True
        ):
            assert all(np.array_equal(x[2], y[2]) for x, y in zip(a, b, strict=True))


def resume(world: World) -> tuple[Any, Any]:
    """Take the third step, both without a break and from the state after two: fused AdamW on the
    device."""
    case = Case(dtype="fp32", m=2)
    config, layout = configure(case)
    rows = Rows(case)
    step = TrainStep(config, layout, world.mesh(Grid(), DEVICE))
    for i in range(2):
        step.train(i, rows)
    state: dict[str, dict[str, torch.Tensor]] = {}
    for own in step.optimizer.own_slices():
        for kind, values in own.values.items():
            assert values.device.type == DEVICE
            whole = values.cpu().clone().view(own.spec.sizes)
            state.setdefault(kind, {})[own.spec.name] = whole
    assert set(state) == {"model", "optimizer.exp_avg", "optimizer.exp_avg_sq"}
    again = TrainStep(config, layout, step.mesh)

    def weights(spec: LocalParameter, out: torch.Tensor) -> None:
        take_region(state["model"][spec.name][: spec.shape[0]], spec, out)

    def moments(moment: str, spec: LocalParameter, out: torch.Tensor) -> None:
        take_region(state[f"optimizer.{moment}"][spec.name][: spec.shape[0]], spec, out)

    again.optimizer.set_weights(weights)
    again.optimizer.set_states(2, moments)
    (straight,), (resumed,) = step.train(2, rows), again.train(2, rows)
    return straight, resumed


def test_resuming_continues() -> None:
    ((straight, resumed),) = run_world(1, resume, timeout_s=TIMEOUT_S)
    assert resumed.loss == pytest.approx(straight.loss, rel=1e-5)
    assert resumed.grad_norm == pytest.approx(straight.grad_norm, rel=1e-4)


def test_bf16_products_are_kept_in_fp32() -> None:
    """The product itself is not rounded to bf16 in between."""
    sharding = Sharding(Axis.alone(), False, torch.bfloat16)
    layer = ColumnParallelLinear(sharding, *column_linear("a", (64, 32), bias=False, std=0.1))
    Bucket(0, list(owned_parameters(layer)), Axis.alone(), torch.device(DEVICE))
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, n, generator=generator).bfloat16() for n in (64, 32))
    add_product(layer.weight, left.to(DEVICE), right.to(DEVICE))
    exact = left.double().t() @ right.double()
    error = (main_grad(layer.weight).double().cpu() - exact).abs().max() / exact.abs().max()
    assert error < 1e-5


def test_initial_weights_are_the_cpu_s() -> None:
    tensors = [torch.empty(100, 600, device=device) for device in ("cpu", DEVICE)]
    for out in tensors:
        draw_normal(out, 1, "a", (100, 600), (0, 0), 0.02)
    assert tensors[0].equal(tensors[1].cpu())


@pytest.fixture
def device_generator() -> Iterator[None]:
    state = torch.cuda.get_rng_state()
    yield
    torch.cuda.set_rng_state(state)


@pytest.mark.usefixtures("device_generator")
def test_seeded_draws_on_the_device_and_restores_its_generator() -> None:
    device = torch.device(DEVICE)
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    draws = []
    for seed in (9, 9, 10):
        with seeded(device, seed):
            draws.append(torch.rand(100, device=device))
    assert torch.cuda.get_rng_state().equal(before)
    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])


def test_operations_are_timed_by_events_of_the_device() -> None:
    watch = Recorder(torch.device(DEVICE))
    watch.begin()
    for microbatch in range(3):
        watch.timed(Op(Kind.F, 0, microbatch), lambda: torch.cuda._sleep(10_000_000))()
    events = watch.events()
    assert [event.op.microbatch for event in events] == [0, 1, 2]
    for before, after in itertools.pairwise(events):
        assert 0 <= before.start < before.end <= after.start < after.end
