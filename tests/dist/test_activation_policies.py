"""Policies on tensor-parallel ranks: the reference's results, the same bits with dropout, and the
bytes of the formula."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from megapipe.model.gpt.saved import Sizes, held, held_tensors
from megapipe.model.gpt.workspace import peaks
from megapipe.plan.context_memory import attention_workspace

from megapipe.config import Config
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.layout import freed
from megapipe.layout.layout import Layout
from megapipe.testing import World, run_world
from megapipe.train.step import TrainStep
from tests.parity.checking import assert_same_bits
from tests.parity.chosen import chosen, evenly
from tests.parity.live_storages import Alive, measure
from tests.parity.marks import in_parts, one_of
from tests.parity.ranks import OF_ALL_MODELS, Case, check_case, configure, run_cases

pytestmark = pytest.mark.full

SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2))
POLICIES = [name for name in OF_ALL_MODELS if name != "keep"]


def cases(world: int, schedules: Sequence[tuple[str, int]] = SCHEDULES) -> list[Case]:
    """Every policy on every schedule, the variants in turn."""
    made = []
    for i, ((schedule, chunks), name) in enumerate(itertools.product(schedules, POLICIES)):
        made.append(
            Case(
                tp=world,
                pp=2,
                m=2,
                schedule=schedule,
                chunks=chunks,
                in_process=True,
                activations=name,
                sequence_parallel=(i + i // len(POLICIES)) % 2 == 0,
                model=("gpt2", "llama", "mixed", "gelu")[i % 4],
                layers=4,
            )
        )
    return made


@pytest.mark.slow
def test_every_policy_and_schedule_on_tensor_parallel_ranks() -> None:
    given = cases(2)
    results = run_world(2, run_cases, given, timeout_s=120)
    for i, case in enumerate(given):
        try:
            check_case(case, [outcomes[i] for outcomes in results])
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from None


@one_of(8)
def test_over_a_wire(some: slice) -> None:
    given = [
        Case(pp=2, m=3, schedule="zb_h1", activations=name, layers=4, model="llama")
        for name in POLICIES[some]
    ]
    results = run_world(2, run_cases, given, timeout_s=120)
    for i, case in enumerate(given):
        check_case(case, [outcomes[i] for outcomes in results])


@one_of(6)
def test_dropout_is_the_same_bitwise(some: slice) -> None:
    """Norms that have one gradient for their input are run again to the same bits."""
    given = [
        replace(case, model="gpt2", dropout=0.2)
        for case in cases(2, SCHEDULES[::3])
        if "attention kept" not in case.activations
    ][some]
    plain = [replace(case, activations="keep") for case in given]
    unique = list(dict.fromkeys(plain))
    for outcomes in run_world(2, run_cases, [*given, *unique], timeout_s=120):
        of = dict(zip([*given, *unique], outcomes, strict=True))
        for case, kept in zip(given, plain, strict=True):
            assert_same_bits(of[case], of[kept], case.name)


def measure_all(world: World, given: list[Case]) -> list[Alive]:
    """Of the second of four stages."""
    alive = []
    for case in given:
        config, layout = configure(case)
        mesh, split = world.mesh(case.grid), layout.split
        step = TrainStep(config, layout, mesh)
        local = layout.local_length // (case.tp if case.sequence_parallel else 1)
        dtype = TORCH_DTYPES[config.model.dtype]
        x = torch.ones(local, case.batch, config.model.hidden, dtype=dtype)
        held = None if split.cp == 1 else split.held([case.sequence], mesh.cp.index)
        mb = MicroBatch(index=0, step=0, seed=1, held=held)
        alive.append(measure(step.stages[1], x, mb))
    return alive


def sizes_of(config: Config, layout: Layout) -> Sizes:
    piece = layout.local_length, config.train.microbatch
    sizes = freed.sizes_of(config, layout.device, layout.split, *piece)
    return sizes._replace(exchanging=attention_workspace(layout, piece[1], piece[0]))


@one_of(2)
def test_bytes_where_positions_are_split(some: slice) -> None:
    base = Case(cp=2, pp=4, in_process=True, layers=8)
    check_bytes(
        [
            replace(base, activations=name, model=model, context=context, kv_heads=kv_heads)
            for name, model, context, kv_heads in (
                ("keep", "gpt2", "ring", None),
                ("keep", "llama", "ring", 2),
                ("keep", "llama", "ulysses", 2),
                ("keep", "qwen", "ulysses", 1),
                ("keep", "capped", "ulysses", 2),
                ("full, attention kept", "llama", "ring", 2),
                ("selective, attention kept", "llama", "ring", 2),
                ("selective, attention kept", "llama", "ulysses", 1),
            )
        ][some]
    )


@one_of(2)
def test_bytes_on_a_tensor_parallel_rank(some: slice) -> None:
    base = Case(tp=2, pp=4, in_process=True, layers=8, dropout=0.1)
    given = [
        replace(base, activations=name, model=model, sequence_parallel=sequence_parallel)
        for name, model, sequence_parallel in (
            ("keep", "gpt2", False),
            ("keep", "llama", True),
            ("full, two together", "llama", True),
            ("selective", "gpt2", True),
            ("of each some", "llama", False),
        )
    ]
    kept = replace(base, activations="full, attention kept", dropout=0.0)
    given += [kept, replace(kept, model="llama", sequence_parallel=True)]
    check_bytes(given[some])


def measure_evenly(world: World, given: list[Case]) -> list[Alive]:
    with evenly():
        return measure_all(world, given)


@one_of(10)
def test_bytes_of_experts(some: slice) -> None:
    """Of a part of each sequence; and of experts on two ranks, where these are chosen evenly."""
    split = Case(tp=2, pp=4, in_process=True, layers=8, sequence_parallel=True)
    context, several = Case(cp=2, pp=4, in_process=True, layers=8), replace(split, ep=2)
    given = [
        replace(case, activations=name, model=model, moe=moe)
        for case, name, model, moe in (
            (split, "keep", "llama", "shared, gated"),
            (split, "full", "gpt2", "residual"),
            (split, "selective", "neox", "top 2"),
            (context, "keep", "gpt2", "top 2"),
            (several, "keep", "llama", "top 2"),
            (several, "selective", "gpt2", "shared, gated"),
            (several, "full, two together", "llama", "top 2"),
            (replace(split, etp=2), "keep", "llama", "residual"),
            (replace(several, dispatch="all_gather"), "keep", "llama", "top 2"),
            (replace(several, expert_chunks=2), "keep", "gpt2", "top 2"),
            (replace(several, dispatch="fetch"), "keep", "llama", "top 2"),
            (replace(split, dispatch="fetch", etp=2), "full", "llama", "top 2"),
            (several, "experts again", "llama", "shared, gated"),
            (replace(split, etp=2, expert_chunks=2), "experts again", "gpt2", "top 2"),
            (replace(several, pad=True), "keep", "llama", "capacity, choice"),
            (replace(split, etp=2, pad=True), "experts again", "gpt2", "capacity, score"),
            (replace(several, pad=True, dispatch="all_gather"), "full", "gpt2", "step"),
        )
    ]
    check_bytes(given[some], measure_evenly)


SKEWED, IMBALANCE = [[0, 1], [1, 0], [2, 3], [0, 1]], Fraction(3, 2)
"""Choices of four tokens, and what the first of two ranks gets by the mean."""


def measure_skewed(world: World, given: list[Case]) -> list[Alive]:
    with chosen(SKEWED):
        return measure_all(world, given)


@pytest.mark.slow
def test_bytes_of_experts_with_more_rows_than_those_of_other_ranks() -> None:
    several = Case(tp=2, pp=4, in_process=True, layers=8, sequence_parallel=True, ep=2, moe="top 2")
    given = [
        replace(several, model="llama"),
        replace(several, dispatch="all_gather", activations="selective"),
        replace(several, expert_chunks=2, activations="experts again"),
    ]
    check_bytes(given, measure_skewed, IMBALANCE)


Measure = Callable[[World, list[Case]], list[Alive]]


def check_bytes(
    given: list[Case], measured: Measure = measure_all, imbalance: Fraction | None = None
) -> None:
    """Of ranks of two, beside the few numbers that layers with experts tell of their routing; with
    an imbalance of the first one, which has most rows."""
    for results in run_world(2, measured, given, timeout_s=120)[: 1 if imbalance else None]:
        for case, alive in zip(given, results, strict=True):
            config, layout = configure(case)
            sizes = sizes_of(config, layout)._replace(imbalance=imbalance)
            numbers = layout.model.told()
            told = [8 * numbers[n] for n in layout.stage_layers[1].layers if n in numbers]
            promised = list(held_tensors(config.model, layout.spans[1], sizes))
            on_device = [tensor.bytes for tensor, in_host in promised if not in_host]
            assert alive.device == sorted(on_device + told), case.name
            assert alive.host == sorted(tensor.bytes for tensor, in_host in promised if in_host)
            queued = held(config.model, layout.spans[1], sizes).queued
            assert sum(alive.queued) == queued + sum(told), case.name
            assert alive.after == told, case.name


def measure_within(world: World, given: list[Case]) -> list[dict[str, int]]:
    """The least of a few times: gloo's threads may let go of what they sent a moment late."""
    times = [[alive.within for alive in measure_all(world, given)] for _ in range(3)]
    return [
        {kind: min(found[kind] for found in of_case) for kind in of_case[0]}
        for of_case in zip(*times, strict=True)
    ]


@one_of(6)
def test_peaks_within_operations_where_attention_is_kept(some: slice) -> None:
    base = Case(cp=2, pp=4, in_process=True, layers=8, sequence=64)
    check_peaks(
        [
            replace(base, activations=name, model=model, kv_heads=kv_heads, context=context)
            for name, model, kv_heads, context in (
                ("full, attention kept", "llama", 2, "ring"),
                ("selective, attention kept", "llama", 2, "ring"),
                ("full, attention kept", "llama", 1, "ulysses"),
                ("full, attention kept", "bloom", None, "ring"),
                ("keep", "capped", 2, "ring"),
                ("full", "capped", None, "all_gather"),
                ("keep", "capped", 2, "ulysses"),
            )
        ][some]
    )


@in_parts(("cp", "every"), [(2, 1), (2, 6), (4, 1)], full=[(2, 6)])
def test_peaks_within_operations_where_positions_are_split(cp: int, every: int) -> None:
    """To the byte, of the member of the ring that takes most; in bf16, where sums are in another
    type, within 2% at heads of 4 values. B is left out: with four ranks gloo's
    threads hold what they have sent for longer."""
    base = Case(cp=cp, pp=4, in_process=True, layers=8, sequence=128)
    plans = {2: ["queries travel", "helpers"], 4: ["teams", "double ring", "usp", "queries travel"]}
    given = [
        replace(base, context=context) for context in ("ring", "striped", "all_gather", *plans[cp])
    ]
    given += [
        replace(base, model="llama", kv_heads=2),
        replace(base, activations="full"),
        replace(base, model="mixed", context="all_gather", kv_heads=2),
    ]
    narrow = [replace(case, dtype="bf16") for case in given if case.model == "gpt2"]
    cases = [*given, *narrow][::every]
    results = run_world(cp, measure_within, cases, timeout_s=240)
    for i, case in enumerate(cases):
        config, layout = configure(case)
        spec, spans = layout.stage_layers[1], layout.spans[1]
        formula = peaks(config.model, spec, spans, sizes_of(config, layout), most_tokens=0)
        for kind in ("F", "I"):
            measured = max(of_rank[i][kind] for of_rank in results)
            error = getattr(formula, kind) / measured - 1
            assert abs(error) <= 0.02 * (case in narrow), f"{case.name}: {kind} is {error:+.1%} off"


@one_of(3)
def test_peaks_within_operations_on_a_tensor_parallel_rank(some: slice) -> None:
    base = Case(tp=2, pp=4, in_process=True, layers=8, sequence=64)
    given = [
        replace(base, activations=name, model=model, sequence_parallel=split)
        for name, model in (("keep", "gpt2"), ("full", "llama"), ("selective", "gpt2"))
        for split in (False, True)
    ]
    check_peaks(given[some])


def measure_evenly_within(world: World, given: list[Case]) -> list[dict[str, int]]:
    with evenly():
        return measure_within(world, given)


@one_of(18)
def test_peaks_within_operations_of_experts(some: slice) -> None:
    """On two ranks, or with one part of each sequence, where they are chosen evenly."""
    split = Case(tp=2, pp=4, in_process=True, layers=8, sequence=64, sequence_parallel=True)
    context = replace(split, tp=1, cp=2, sequence_parallel=False)
    several, parts = replace(split, ep=2), replace(split, etp=2)
    given = [
        replace(case, activations=name, model=model, moe=moe)
        for case, name, model, moe in (
            (split, "keep", "gpt2", "shared, gated"),
            (context, "full", "llama", "groups"),
            (replace(context, ep=2), "keep", "llama", "top 2"),
            (several, "keep", "gpt2", "top 2"),
            (several, "keep", "llama", "groups"),
            (several, "full", "llama", "residual"),
            (several, "selective", "neox", "top 2"),
            (replace(several, expert_chunks=2), "keep", "llama", "top 2"),
            (parts, "keep", "llama", "top 2"),
            (replace(parts, expert_chunks=3), "keep", "gpt2", "top 2"),
            (replace(several, dispatch="all_gather"), "keep", "llama", "top 2"),
            (replace(several, dispatch="all_gather", expert_chunks=2), "full", "gpt2", "top 2"),
            (replace(several, dispatch="fetch"), "keep", "llama", "top 2"),
            (replace(several, dispatch="fetch", expert_chunks=2), "keep", "gpt2", "top 2"),
            (replace(parts, dispatch="fetch", expert_chunks=2), "full", "llama", "top 2"),
            (several, "experts again", "llama", "groups"),
            (replace(parts, expert_chunks=2), "experts again", "gpt2", "top 2"),
            (replace(several, dispatch="all_gather"), "experts again", "neox", "residual"),
            (replace(several, dispatch="fetch"), "experts again", "llama", "top 2"),
        )
    ]
    check_peaks(given[some], measure_evenly_within)


@pytest.mark.slow
def test_peaks_within_operations_of_experts_whose_rows_are_coded() -> None:
    base = Case(tp=2, pp=4, in_process=True, layers=8, sequence=64, sequence_parallel=True)
    several, parts = replace(base, ep=2, dtype="fp32"), replace(base, etp=2, dtype="bf16")
    given = [
        replace(case, codec=codec, activations=name, model=model, moe=moe)
        for case, codec, name, model, moe in (
            (several, "int8", "keep", "llama", "top 2"),
            (several, "bf16", "keep", "gpt2", "groups"),
            (replace(several, expert_chunks=2), "int8", "experts again", "gpt2", "top 2"),
            (replace(several, dispatch="all_gather"), "int8", "keep", "llama", "top 2"),
            (replace(several, dispatch="all_gather"), "bf16", "full", "gpt2", "top 2"),
            (parts, "int8", "keep", "gpt2", "top 2"),
            (replace(parts, expert_chunks=3, dtype="fp32"), "bf16", "full", "llama", "top 2"),
            (replace(base, ep=2), "int8", "keep", "llama", "top 2"),
        )
    ]
    check_peaks(given, measure_evenly_within)


@pytest.mark.slow
def test_peaks_within_operations_of_experts_with_room_for_all_rows() -> None:
    """However they are chosen."""
    base = Case(tp=2, pp=4, in_process=True, layers=8, sequence=64, sequence_parallel=True)
    several, parts = (replace(base, **{axis: 2}, pad=True) for axis in ("ep", "etp"))
    given = [
        replace(case, activations=name, model=model, moe=moe)
        for case, name, model, moe in (
            (replace(base, pad=True), "keep", "gpt2", "capacity, choice"),
            (several, "keep", "llama", "capacity, choice"),
            (replace(several, dtype="bf16"), "full", "gpt2", "capacity, position"),
            (replace(several, expert_chunks=3), "experts again", "gpt2", "capacity, choice"),
            (parts, "keep", "llama", "step"),
            (replace(several, dispatch="all_gather"), "keep", "gpt2", "capacity, choice"),
            (replace(several, dispatch="fetch"), "keep", "llama", "step"),
            (replace(several, codec="int8", dtype="fp32"), "keep", "llama", "capacity, choice"),
        )
    ]
    check_peaks(given)


@pytest.mark.slow
def test_peaks_within_operations_of_experts_in_two_hops() -> None:
    base = Case(tp=4, pp=4, in_process=True, layers=8, sequence=64, sequence_parallel=True, ep=4)
    hops = replace(base, moe="top 2", dispatch="hierarchical", node=2)
    coded = replace(hops, dtype="fp32", codec="int8")
    given = [hops, replace(hops, ep=2, etp=2, expert_chunks=2), coded, replace(coded, codec="bf16")]
    check_peaks(given, measure_evenly_within, 4)


def measure_skewed_within(world: World, given: list[Case]) -> list[dict[str, int]]:
    with chosen(SKEWED):
        return measure_within(world, given)


@pytest.mark.slow
def test_peaks_within_operations_of_experts_with_more_rows_than_those_of_other_ranks() -> None:
    base = Case(tp=2, pp=4, in_process=True, layers=8, sequence=64, sequence_parallel=True, ep=2)
    given = [
        replace(base, moe="top 2"),
        replace(base, moe="top 2", model="llama", activations="full"),
        replace(base, moe="top 2", model="llama", dispatch="all_gather", expert_chunks=2),
        replace(base, moe="top 2", dtype="fp32", codec="int8", activations="experts again"),
    ]
    check_peaks(given, measure_skewed_within, imbalance=IMBALANCE)


Within = Callable[[World, list[Case]], list[dict[str, int]]]


def check_peaks(
    given: list[Case],
    measured: Within = measure_within,
    world: int = 2,
    imbalance: Fraction | None = None,
) -> None:
    """Of all ranks; with an imbalance of the first one, which has most rows."""
    results_of = run_world(world, measured, given, timeout_s=60 + 20 * len(given))
    for results in results_of[: 1 if imbalance else None]:
        for case, within in zip(given, results, strict=True):
            config, layout = configure(case)
            sizes = sizes_of(config, layout)._replace(imbalance=imbalance)
            spec, spans = layout.stage_layers[1], layout.spans[1]
            formula = peaks(config.model, spec, spans, sizes, most_tokens=0)
            for kind, measured in within.items():
                error = getattr(formula, kind) / measured - 1
                assert abs(error) < 0.02, f"{case.name}: {kind} is {error:+.1%} off"
