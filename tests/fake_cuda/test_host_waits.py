"""The host waits for its GPU once per step, to read the totals, and never within a program, also
while GPU time is measured. Only MoE layers that count rows wait within a program."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megapipe import TrainStep
from megapipe.engine.executor import Executor
from megapipe.train.compute_times import ComputeTimes
from tests.fake_cuda.world import run_world
from tests.parity.cases import END, Case, Rows, configure
from tests.parity.tiers import in_parts

PIPELINE = Case(pp=2, m=4, schedule="zb_h1", masked=0.3)
CASES = [
    Case(),
    Case(dtype="bf16", offload="host", state_dtype="bf16"),
    Case(activations="offload", dtype="fp32"),
    Case(model="gemma"),
    Case(model="bloom", documents=True, sequence=12),
    Case(rule="muon"),
    Case(lora="all"),
    Case(dp=2, zero=0),
    Case(dp=2, zero=3, dtype="fp16", loss_scale=2.0**10),
    Case(tp=2, sequence_parallel=True, dropout=0.2),
    Case(tp=2, documents=True, sequence=12),
    Case(tp=2, model="gemma"),
    Case(dp=2, zero=3, rule="muon"),
    Case(cp=2, model="llama", kv_heads=2, masked=0.3),
    Case(cp=2, documents=True, sequence=12),
    Case(cp=2, model="qwen", kv_heads=2, documents=True, dtype="bf16", sequence=24),
    Case(cp=2, context="ulysses", activations="full, attention kept"),
    PIPELINE,
    replace(PIPELINE, schedule="zb_v"),
    replace(PIPELINE, post_validation=True),
    replace(PIPELINE, schedule="dualpipe"),
    replace(PIPELINE, schedule="seq1f1b", slices=2),
    Case(dp=2, pp=2, chunks=2, m=4, schedule="interleaved_1f1b", zero=2, tied=False, layers=4),
    Case(tp=2, pp=2, m=4, layers=4, scatter="on"),
    Case(cp=2, pp=2, documents=True, m=3, sequence=12),
    Case(cp=4, context="teams", sequence=16),
    replace(PIPELINE, cp=2, post_validation=True),
    Case(pp=3, m=6, layers=6, schedule="zb_v", activations="offload", dtype="fp32"),
    Case(dp=2, tp=2, pp=2, m=4, schedule="zb_h1", layers=4),
]


class Waits:
    """Counts the waits of the host; those within programs are counted apart."""

    def __init__(self) -> None:
        self.inside: Counter[str] = Counter()
        self.outside: Counter[str] = Counter()
        self.faults: list[str] = []
        self.own_s: list[float] = []
        """The rank's own time in the steps."""

    def note(self, counter: Counter[str]) -> None:
        """Add the waits since the last note."""
        from tests.fake_cuda.preload import own

        noted = own.report()
        counter.update(noted["host_waits"])
        self.faults += noted["faults"]

    def watch(self, executor: Executor) -> None:
        run = executor._run

        def watched(*parts: int) -> None:
            self.note(self.outside)
            run(*parts)
            self.note(self.inside)

        executor._run = watched  # type: ignore[method-assign]


def waits_in_steps(world: Any, cases: list[Case]) -> list[Waits]:
    """Return the waits of the last of three steps of each case."""
    found = []
    for case in cases:
        config, layout = configure(replace(case, steps=4))
        mesh = world.mesh(case.grid, "cuda")
        step, rows = TrainStep(config, layout, mesh, document_end=END), Rows(case)
        own = ComputeTimes(mesh.journal.own_time, mesh.device)
        for i in range(2):
            with own.step():
                step.train(i, rows)
        waits = Waits()
        waits.watch(step.stepper.executors.plain[0])
        waits.note(Counter())
        with own.step():
            step.train(2, rows)
        waits.own_s += own.known()
        waits.note(waits.outside)
        step.settle()
        found.append(waits)
    return found


@in_parts(
    ("world", "every"),
    [(1, 1), (2, 1), (2, 8), (3, 1), (4, 1), (4, 3), (8, 1)],
    full=[(2, 8), (3, 1)],
)
def test_one_wait_in_a_step(world: int, every: int) -> None:
    cases = [case for case in CASES if case.world == world][::every]
    for of_rank in run_world(world, waits_in_steps, cases):
        for case, found in zip(cases, of_rank, strict=True):
            assert not found.faults
            assert not found.inside, case.name
            assert found.outside == {"copy to the host": 1}, case.name
            assert len(found.own_s) == 3, case.name
            assert min(found.own_s) > 0, case.name


@pytest.mark.full
def test_states_on_a_disk_have_the_host_wait_between_programs_alone() -> None:
    """It reads and writes the states; see docs/decisions/distributed.md."""
    ((found,),) = run_world(1, waits_in_steps, [Case(offload="disk")])
    assert not found.faults
    assert not found.inside
    assert found.outside["copy to the host"] > 1


EXPERTS = [
    Case(model="llama", moe="top 2", m=3, layers=2),
    Case(moe="shared, gated", activations="full", m=2, layers=2),
    Case(dp=2, ep=2, moe="capacity, position", layers=2),
    Case(tp=2, sequence_parallel=True, etp=2, moe="groups", layers=4, m=2),
    Case(
        dp=2,
        ep=2,
        moe="top 2",
        layers=2,
        dispatch="all_gather",
        expert_chunks=2,
        topology=(4.0, 1.0),
    ),
    Case(dp=2, ep=2, moe="capacity, choice", layers=2, m=2, expert_chunks=3, codec="int8"),
    Case(dp=2, etp=2, moe="top 2", layers=2, dispatch="fetch", expert_chunks=2),
    Case(dp=2, ep=2, moe="top 2", layers=2, placement="changing"),
    Case(dp=4, ep=4, moe="top 2", layers=2, dispatch="hierarchical", node=2),
    Case(moe="step, first", layers=2, m=2),
    Case(moe="groups", layers=2, m=2, dtype="bf16", grouped=True),
    replace(PIPELINE, moe="residual", layers=4),
]


@in_parts("world", [1, 2, 4], full=[4])
def test_layers_with_experts_tell_the_host_their_rows_once(world: int) -> None:
    """Once per micro-batch, also for recomputed layers: tensor sizes depend on the row counts."""
    cases = [case for case in EXPERTS if case.world == world]
    for rank, of_rank in enumerate(run_world(world, waits_in_steps, cases)):
        for case, found in zip(cases, of_rank, strict=True):
            assert not found.faults
            config, layout = configure(case)
            (stage,) = layout.process_stages(rank * case.pp // world)
            layers = sum(map(config.model.moe.has_experts, layout.stage_layers[stage].layers))
            assert found.inside == {"copy to the host": layers * case.m}, case.name
            assert found.outside == {"copy to the host": 1}, case.name


PADDED = [
    Case(moe="capacity, choice", layers=2, m=2, pad=True),
    Case(moe="random", activations="full", layers=2, m=2, pad=True),
    Case(dp=2, ep=2, moe="capacity, position", layers=2, m=2, pad=True, expert_chunks=2),
    Case(tp=2, sequence_parallel=True, etp=2, moe="capacity, score", layers=2, pad=True),
    Case(
        dp=2,
        ep=2,
        moe="step",
        layers=2,
        dispatch="all_gather",
        codec="int8",
        dtype="fp32",
        pad=True,
    ),
    Case(cp=2, ep=2, moe="random", layers=2, dispatch="fetch", pad=True),
    replace(PIPELINE, moe="pyramid, biased", layers=4, activations="experts again", pad=True),
    Case(dp=4, ep=4, moe="step", layers=2, dispatch="hierarchical", node=2, pad=True),
]


@in_parts("world", [1, 2, 4], full=[1, 4])
def test_layers_with_room_for_all_rows_tell_the_host_nothing(world: int) -> None:
    cases = [case for case in PADDED if case.world == world]
    for of_rank in run_world(world, waits_in_steps, cases):
        for case, found in zip(cases, of_rank, strict=True):
            assert not found.faults
            assert not found.inside, case.name
            assert found.outside == {"copy to the host": 1}, case.name
