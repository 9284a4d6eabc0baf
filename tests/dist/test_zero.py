"""ZeRO 0 to 3 compute the same, under every schedule, and exchange checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.schedule.generators import names
from megapipe.testing import run_world
from tests.parity import registry_cases
from tests.parity.jobs import tiny
from tests.parity.ranks import (
    Case,
    assemble,
    check_case,
    expected,
    plain,
    run_cases,
)
from tests.parity.stopped_runs import (
    BASE,
    HALF,
    Play,
    assert_continues,
    assert_same_files,
    checkpoint,
    run,
    save_as_loaded,
)
from tests.parity.stopped_runs import (
    STEPS as JOB_STEPS,
)

pytestmark = pytest.mark.full


def test_the_copies_agree_and_gradients_lose_little_when_they_travel_in_bf16() -> None:
    """Each gradient is rounded to 8 bits before it is added up in fp32, three times at most."""
    base = Case(dp=4, pp=2, m=2, dtype="fp32", zero=1)
    ways = [
        replace(base, zero=zero, shard_size=size, reduce_dtype="bf16")
        for zero, size in ((0, None), (1, None), (1, 2), (3, None))
    ]
    ranks = run_world(8, run_cases, [base, *ways])
    shapes = expected(plain(replace(base, dtype="fp64")))[0][0].grads
    exact, *others = (
        assemble([outcomes[i].grads[0] for outcomes in ranks], shapes) for i in range(1 + len(ways))
    )
    whole = sum(grad.square().sum() for grad in exact.values()).sqrt()
    for case, grads in zip(ways, others, strict=True):
        error = sum((grads[name] - exact[name]).square().sum() for name in exact).sqrt()
        assert 2**-12 < error / whole < 2**-8, f"{case.name}: {error / whole:.2g}"
    for i, case in enumerate((base, *ways)):
        copies: dict[str, Any] = {}
        for outcomes in ranks:
            for name, _, values in outcomes[i].copies[-1]:
                assert np.array_equal(copies.setdefault(name, values), values), (case.name, name)


SHARED = [
    Case(
        dp=4,
        pp=2,
        m=4,
        schedule=schedule,
        zero=zero,
        shard_size=size,
        masked=0.3,
        prefetch=prefetch,
    )
    for (schedule, zero, size), prefetch in zip(
        [
            ("chimera", 0, None),
            ("chimera", 2, None),
            ("chimera", 3, None),
            ("dualpipe", 3, 2),
            ("gems", 1, 1),
            ("gems", 2, 2),
            ("bitpipe", 3, 2),
            ("1f1b", 3, 2),
            ("zb_v", 2, 2),
        ],
        [1, 1, 0, 1, 1, 1, 2, 0, 1],
        strict=True,
    )
]


def check_all(cases: list[Case]) -> None:
    """Check cases of one world size against the plain reference in fp64."""
    results = run_world(cases[0].world, run_cases, cases, timeout_s=30 + 10 * len(cases))
    for i, case in enumerate(cases):
        try:
            check_case(case, [outcomes[i] for outcomes in results])
        except AssertionError as error:
            error.add_note(f"case: {case.name}")
            raise


@pytest.mark.slow
def test_tied_and_replicated_stages() -> None:
    check_all(SHARED)


def on_every_schedule(pp: int, *, in_process: bool) -> list[Case]:
    """Return ZeRO-3 cases with 0, 1 or 2 stages prefetched, by turns."""
    cases = []
    for i, name in enumerate(names()):
        case = next(case for case in registry_cases.settings(name) if case.pp == pp)
        if pp == 2:
            case = replace(case, m=4)
        cases.append(
            replace(
                case,
                dp=2,
                zero=3,
                prefetch=i % 3,
                tied=i % 2 == 0,
                in_process=in_process,
                masked=0.3,
                activations=("keep", "selective")[i // 2 % 2],
            )
        )
    return cases


@pytest.mark.slow
def test_weights_on_demand_under_every_schedule() -> None:
    check_all(on_every_schedule(2, in_process=False))


@pytest.mark.slow
def test_weights_on_demand_under_every_schedule_in_one_process() -> None:
    """A stage's weights are gathered for all pipeline ranks that are in the process."""
    check_all(on_every_schedule(4, in_process=True))


SHARDED = {
    "parallel.dp": "4",
    "optimizer.zero": "3",
    "optimizer.shard_group_size": "2",
    "optimizer.weight_prefetch": "0",
    "pipeline.chunks": "2",
    "pipeline.schedule": "breadth_first",
}
PLAIN = {"parallel.dp": "2", "parallel.pp": "2"}
GRADIENTS = {**PLAIN, "optimizer.zero": "2", "pipeline.schedule": "zb_v"}


def test_checkpoints_know_no_zero_stage(tmp_path: Path) -> None:
    """Saved by ZeRO-3, sharded over pairs of four replicas; loaded by ZeRO-1 of two and saved from
    there: the same files. So the other way round, with ZeRO-2 between. And a run that stops is the
    one that does not."""
    stopped = Play("parts", SHARDED, stop_after=HALF)
    full, _, parts = run(tmp_path, Play("full", SHARDED), stopped, Play("parts", SHARDED))
    assert parts[0]["first_step"] == HALF
    assert_continues(parts, full)
    saved = checkpoint(tmp_path, "full", HALF)
    assert_same_files(saved, checkpoint(tmp_path, "parts", HALF))
    base = {**tiny(tmp_path), **BASE}
    for i, settings in enumerate((PLAIN, GRADIENTS, SHARDED)):
        source, target = saved, tmp_path / f"again-{i}"
        (path, *_) = run_world(4, save_as_loaded, {**base, **settings}, str(source), str(target))
        assert_same_files(Path(path), saved)
        saved = Path(path)
    load = {"checkpoint.load": str(checkpoint(tmp_path, "full", HALF))}
    (moved,) = run(tmp_path, Play("moved", {**PLAIN, **load}))
    for step in range(HALF + 1, JOB_STEPS + 1):
        here, there = moved[0]["steps"][step], full[0]["steps"][step]
        assert here.loss == pytest.approx(there.loss, rel=1e-6)
        assert here.grad_norm == pytest.approx(there.grad_norm, rel=1e-5)
    assert moved[0]["validation"] == pytest.approx(full[0]["validation"], rel=1e-6)
