"""Layouts and switches with a device per rank: the reference's results, with correct stream
order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fake_cuda.world import run_world
from tests.parity import draw
from tests.parity.case_file import read
from tests.parity.moved_experts import run_moving
from tests.parity.pair_runs import case_of
from tests.parity.ranks import Case, check_case, run_cases
from tests.parity.tiers import in_parts

SHARDED = Case(
    dp=2, pp=2, chunks=2, m=4, schedule="interleaved_1f1b", tied=False, masked=0.3, layers=4
)
PACKED = Case(cp=2, model="qwen", kv_heads=2, documents=True, dtype="bf16", sequence=24)
"""A case whose short documents in a tile go to one kernel call."""
CASES = [
    Case(model="llama", tied=False, kv_heads=2, activations="of each some"),
    Case(dtype="bf16", offload="host", state_dtype="bf16", loss_chunk=5),
    Case(pp=2, m=3, schedule="seq1f1b", slices=3, in_process=True, documents=True, sequence=12),
    # two
    Case(dp=2, zero=0, reduce_dtype="bf16", dtype="fp32"),
    Case(tp=2, sequence_parallel=True, activations="full, two together", dropout=0.2),
    Case(pp=2, m=4, schedule="zb_h1", post_validation=True, masked=0.3),
    Case(pp=2, m=4, schedule="dualpipe", debug=True),
    Case(pp=2, m=3, schedule="zb_v", activations="offload"),
    Case(dp=2, zero=3, prefetch=0, dtype="fp16", loss_scale=2.0**10),
    Case(cp=2, model="llama", kv_heads=2, masked=0.3),
    Case(pp=2, m=4, moe="top 2", masked=0.3),
    Case(moe="groups", dtype="bf16"),
    Case(
        dp=2,
        ep=2,
        moe="top 2",
        layers=2,
        dispatch="all_gather",
        expert_chunks=2,
        topology=(4.0, 1.0),
    ),
    Case(
        dp=2,
        ep=2,
        moe="capacity, choice",
        layers=2,
        expert_chunks=3,
        codec="int8",
        activations="full",
    ),
    Case(dp=2, ep=2, moe="top 2", layers=2, placement="changing", masked=0.3, steps=3),
    Case(cp=2, context="ulysses", masked=0.3, activations="full, attention kept"),
    Case(cp=2, model="capped", documents=True, masked=0.3, sequence=12),
    PACKED,
    replace(PACKED, schedule="seq1f1b", slices=2, m=2),
    Case(pp=2, m=3, documents=True, activations="full, attention kept", sequence=12),
    # four
    Case(cp=2, pp=2, documents=True, m=3, sequence=12),
    Case(cp=4, context="teams", sequence=16, model="llama"),
    Case(cp=2, dp=2, context="queries travel", zero=3),
    Case(cp=4, sequence=16, masked=0.3),
    Case(dp=4, ep=2, etp=2, moe="top 2", layers=2, dispatch="fetch", expert_chunks=2),
    Case(
        dp=4, etp=2, ep=2, moe="top 2", layers=2, dispatch="hierarchical", node=2, expert_chunks=2
    ),
    Case(cp=2, pp=2, context="all_gather", schedule="seq1f1b", slices=2, m=3, sequence=16),
    replace(SHARDED, zero=2, reduce_chunk_mib=0.01),
    replace(SHARDED, zero=3, activations="offload", model="llama"),
    Case(dp=2, tp=2, rule="muon", documents=True, scatter="off", sequence=12),
    Case(tp=2, pp=2, m=4, schedule="seq1f1b", slices=2, scatter="on", masked=0.3),
    Case(dp=4, zero=3, shard_size=2, dtype="bf16", state_dtype="bf16", master="none"),
]
LARGE = [
    Case(dp=2, tp=2, pp=2, chunks=2, m=4, schedule="interleaved_1f1b", zero=2, offload="host"),
    Case(dp=4, pp=2, m=4, schedule="zb_h1", zero=3, shard_size=2, prefetch=1, tied=False),
    Case(dp=2, pp=4, m=6, schedule="chimera", batch=1, rule="lamb"),
]


def check(cases: list[Case], world: int, every: int = 1) -> None:
    cases = [case for case in cases if case.world == world][::every]
    assert cases
    results = run_world(world, run_cases, cases, "cuda", timeout_s=60 + 20 * len(cases))
    for i, case in enumerate(cases):
        try:
            check_case(case, [outcomes[i] for outcomes in results])
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from None


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_parity(world: int) -> None:
    check(CASES, world)


@in_parts("world", [2, 4], full=[2])
def test_some_cases(world: int) -> None:
    check(CASES, world, every=3)


@pytest.mark.full
def test_parity_where_experts_change_their_owners() -> None:
    case = Case(dp=4, ep=2, moe="top 2", layers=2, zero=2, offload="host", masked=0.3, steps=3)
    check_case(case, run_world(4, run_moving, case, 1, "cuda"))


@pytest.mark.full
def test_parity_of_eight() -> None:
    check(LARGE, 8)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_pairs(world: int) -> None:
    """A third of the cases that hold every pair of values: all of them take hours on this device.
    Cases with compiled blocks are left out."""
    cases = [case_of("parity", case) for case in read("parity")[0]]
    here = [case for case in cases if case.world == world and not case.compile]
    here = [case for case in here if case.tp < 4 or case.dtype != "bf16"]
    here = here[draw.number(3, "device", world) :: 3]
    # GPUs have grouped products of bf16 only
    here = [replace(case, grouped=case.grouped and case.dtype == "bf16") for case in here]
    for i in range(0, len(here), 6):
        check(here[i : i + 6], world)
