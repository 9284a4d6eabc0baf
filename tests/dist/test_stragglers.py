"""A rank that computes slowly is named, no other one is, and nothing else happens to it.

Operations mostly sleep in these jobs, and clocks stand still while other programs have the
processor, as tests share it; what ranks wait for their tensor-parallel peers is real.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.parity.naive_reader import read_global
from tests.parity.slow_rank import EVERY, STEPS, Slow, run_watched
from tests.parity.tiers import in_parts

PP2_TP2 = {"parallel.pp": "2", "parallel.tp": "2", "pipeline.stage_layout": "[1,1]"}
DP2_TP2 = {"parallel.dp": "2", "parallel.tp": "2"}
DP3 = {"parallel.dp": "3", "train.global_batch": "6"}
UNEVEN = {"parallel.pp": "4", "model.layers": "8", "pipeline.stage_layout": "[4,1,1,2]"}
LAYOUTS = {"pp2_tp2": PP2_TP2, "dp2_tp2": DP2_TP2, "dp3": DP3, "uneven": UNEVEN}
ENDS = [5 + EVERY, STEPS]
"""Steps that end a window."""


def ranks_of(settings: dict[str, str]) -> int:
    return 3 if settings is DP3 else 4


@in_parts(
    ("layout", "rank"),
    [
        ("pp2_tp2", 2),
        ("pp2_tp2", 1),
        ("dp2_tp2", 3),
        ("dp3", 1),
        *(("uneven", rank) for rank in (1, 0, 3)),
    ],
    full=[("pp2_tp2", 2)],
)
def test_the_slow_rank_is_named(layout: str, rank: int, tmp_path: Path) -> None:
    """The slow rank's tensor-parallel peer waits for it within operations, which take as long
    there."""
    settings = LAYOUTS[layout]
    job = run_watched(tmp_path, ranks_of(settings), Slow((rank,)), **settings)
    assert job.told == [(rank, "a", 6)], job.outcome.text
    assert list(job.scores) == ENDS
    for slowest, score in job.scores.values():
        assert slowest == rank
        assert 1.5 < score < 12, "it sleeps ten times as long"


@in_parts("layout", ["pp2_tp2", "uneven"], full=["uneven"])
def test_ranks_that_are_as_fast_as_others_are_not_named(layout: str, tmp_path: Path) -> None:
    settings = LAYOUTS[layout]
    job = run_watched(tmp_path, ranks_of(settings), Slow(), **settings)
    assert job.told == []
    assert list(job.scores) == ENDS


@pytest.mark.slow
def test_no_bit_depends_on_it(tmp_path: Path) -> None:
    """The pipeline does not meet at the end of its steps."""
    settings = {"parallel.pp": "2", "pipeline.schedule": "zb_h1", "pipeline.stage_layout": "[1,1]"}
    settings |= {"optimizer.post_validation": "true", "train.steps": "12"}
    losses, states = [], []
    for every in ("0", "1"):
        (folder := tmp_path / every).mkdir()
        slow = Slow((1,), layer_s=0.001 * int(every))
        job = run_watched(folder, 2, slow, **settings, **{"log.straggler_window": every})
        losses.append([record["loss"] for record in job.steps])
        states.append(read_global(folder / "runs/run/checkpoints/step-00000012"))
        assert len(job.scores) == 7 * int(every)
    assert losses[0] == losses[1]
    assert all(map(math.isfinite, losses[0]))
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert np.array_equal(tensor.bits, states[1][name].bits), name


def test_a_rank_alone_has_no_score(tmp_path: Path) -> None:
    job = run_watched(tmp_path, 1, Slow((0,), layer_s=0.0), **{"log.straggler_window": "1"})
    assert job.told == []
    assert job.scores == {}
    assert {record["straggler_score"] for record in job.steps} == {None}


@pytest.mark.slow
@pytest.mark.deadline
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("turn", range(10))
def test_noise_names_nobody(layout: str, turn: int, tmp_path: Path) -> None:
    """Ranks that share too few processors with each other are not named.

    A program that takes a processor from one of them makes this one a straggler indeed.
    """
    settings = {**LAYOUTS[layout], "model.hidden": "64", "train.sequence_length": "64"}
    world = ranks_of(LAYOUTS[layout])
    every = {"log.straggler_window": "20", "train.steps": "85"}
    job = run_watched(
        tmp_path, world, Slow(layer_s=0.0, steady=False), limit_s=600.0, **{**settings, **every}
    )
    assert job.told == []
    assert len(job.scores) == 4


@pytest.mark.slow
def test_a_rank_that_recovers(tmp_path: Path) -> None:
    """Slow in steps 6 to 21, told of then and when it is over."""
    slow, longer = Slow((1,), last=STEPS), {"train.steps": str(STEPS + 2 * EVERY)}
    job = run_watched(tmp_path, 3, slow, **{**DP3, **longer})
    assert job.told == [(1, "a", 6), (1, "no", STEPS + 1)]


@contextlib.contextmanager
def quota(share: float) -> Iterator[str]:
    """Make a control group whose processes get this share of a processor."""
    group = Path(f"/sys/fs/cgroup/cpu/megapipe-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("50000")
        (group / "cpu.cfs_quota_us").write_text(str(round(50000 * share)))
        (group / "cpu.shares").write_text(str(max(2, int(1024 / 1.25 ** os.nice(0)))))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        yield str(group)
    finally:
        group.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2_tp2", "dp3", "uneven"])
def test_a_processor_that_is_throttled(layout: str, tmp_path: Path) -> None:
    settings = {**LAYOUTS[layout], "model.hidden": "64", "train.sequence_length": "64"}
    world, every = ranks_of(LAYOUTS[layout]), {"log.straggler_window": "12", "train.steps": "29"}
    with quota(0.03) as group:
        slow = Slow((1,), layer_s=0.0, group=group, steady=False)
        job = run_watched(tmp_path, world, slow, limit_s=600.0, **{**settings, **every})
    assert job.told == [(1, "a", 6)], job.outcome.text
