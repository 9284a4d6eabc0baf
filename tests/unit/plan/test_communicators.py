"""The groups that the plan counts, and what it says of their memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megapipe.cli import parse
from megapipe.layout.resolve import resolve
from megapipe.plan.communicators import (
    CONTEXT,
    CUBLAS,
    LARGER,
    PAIR,
    THREAD_BLOCK,
    communicators,
)
from megapipe.plan.report import report
from megapipe.schedule.generators import names
from tests.parity.cases import configure
from tests.parity.registry_cases import settings
from tests.parity.tiers import in_parts

MODEL = ["model.layers=8", "model.hidden=64", "model.heads=4", "model.vocab_size=257"]


def made(rank: int, *overrides: str) -> tuple[list[int], int]:
    """Return the members of the groups, and the channels, of a process at a pipeline index."""
    config, layout = resolve(parse([*MODEL, *overrides]).config, None, None)
    found = communicators(config, layout, rank)
    assert found.number <= 8
    return sorted(found.groups), found.channels


@pytest.mark.parametrize(
    ("overrides", "rank", "groups", "channels"),
    [
        ([], 0, [], 0),
        (["parallel.dp=4", "parallel.tp=2"], 0, [2, 4], 0),
        (["parallel.pp=4"], 0, [2], 2),  # the tied embedding's
        (["parallel.pp=4"], 1, [], 4),
        (["parallel.pp=4", "parallel.dp=2"], 3, [2, 4], 2),
        (["parallel.pp=4", "parallel.dp=2", "optimizer.zero=0"], 3, [2, 4], 2),
        (["parallel.pp=4", "pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2"], 0, [2], 4),
        (["parallel.pp=4", "parallel.dp=4", "optimizer.shard_group_size=2"], 0, [2, 2, 4], 2),
        (["parallel.pp=4", "pipeline.schedule=chimera"], 1, [2], 4),
        (["parallel.pp=4", "pipeline.transport=in_process", "parallel.dp=2"], 0, [2], 0),
        (["parallel.cp=4"], 0, [4, 4], 0),
        (["parallel.cp=4", "context.ulysses=4"], 0, [4, 4], 0),
        (["parallel.cp=4", "context.ulysses=2"], 0, [2, 2, 4], 0),
    ],
)
def test_counted(overrides: list[str], rank: int, groups: list[int], channels: int) -> None:
    assert made(rank, *overrides) == (groups, channels)


@in_parts(
    "layout",
    [
        {"dp": 4, "tp": 2, "zero": 3, "shard_size": 2},
        {"dp": 2, "cp": 2, "tp": 2},
        {"dp": 2, "cp": 4, "context": "usp"},
    ],
    default=3,
    full=1,
    ids=str,
)
def test_eight_at_most_under_every_schedule(layout: dict[str, Any]) -> None:
    most = {}
    for name in names():
        for case in settings(name):
            given = configure(replace(case, layers=24, sequence=48, **layout))
            found = max(communicators(*given, rank).number for rank in range(case.pp))
            most[name] = max(found, most.get(name, 0))
    assert most.pop("1f1b_rr") == 10
    assert max(most.values()) == 8


def test_their_memory_is_in_the_plan_of_a_gpu() -> None:
    given = [*MODEL, "parallel.pp=4", "parallel.dp=4", "pipeline.p2p_max_ctas=2"]
    config, layout = resolve(parse([*given, "parallel.device=cuda"]).config, None, None)
    # the last rank: its replicas, those of the tied embedding, two channels
    assert communicators(config, layout, 3).nbytes(2) == 2 * LARGER + 2 * 2 * THREAD_BLOCK
    assert PAIR < LARGER
    about = (CONTEXT + CUBLAS + 2 * LARGER + 4 * THREAD_BLOCK) / 1e9
    assert f"CUDA and its libraries about {about:.3g} GB" in report(config, layout)
    config, layout = resolve(parse([*given, "parallel.device=cpu"]).config, None, None)
    assert "NCCL" not in report(config, layout)
