"""Every layout computes what the plain single-process reference computes (fp64)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from parity import Case, check_case, run_cases

from megapipe.testing import run_world

WORLDS = (1, 2, 4, 8)
SCHEDULES = (
    ("gpipe", 1),
    ("gpipe", 2),
    ("1f1b", 1),
    ("interleaved_1f1b", 1),
    ("interleaved_1f1b", 2),
    ("zb_h1", 1),
)
LAYOUTS = [
    (dp, tp, pp)
    for dp, tp, pp in itertools.product((1, 2, 4), repeat=3)
    if dp * tp * pp <= 8
]
DIMENSIONS: dict[str, list[Any]] = {
    "layout": LAYOUTS,
    "schedule": list(SCHEDULES),
    "m": list(range(1, 10)),
    "sequence_parallel": [False, True],
    "tied": [False, True],
    "uneven": [False, True],
    "vocab": [300, 512],
    "kv_heads": [None, 2],
    "masked": [0.0, 0.4],
    "documents": [False, True],
    "zero": [0, 1, 2, 3],
    "shard_size": [None, 1, 2],
    "prefetch": [0, 1],
    "offload": ["none", "host", "disk"],
    "post_validation": [False, True],
    "loss_chunk": [None, 0, 5],
    "model": ["gpt2", "llama", "mixed", "gelu"],
    "activations": ["keep", "stage", "full, two together", "of each some"],
    "in_process": [False, True],
    "debug": [False, True],
    "clip": [0.05, None],
}


def to_case(choice: dict[str, Any]) -> Case | None:
    """The case of one value per dimension; None where they exclude each other."""
    values = dict(choice)
    dp, tp, pp = values.pop("layout")
    schedule, chunks = values.pop("schedule")
    stages = pp * chunks
    if values["kv_heads"] == 2 and tp > 2:
        return None
    if values["uneven"] and stages == 1:
        return None
    if values["post_validation"] and (
        values["zero"] == 3 or values["offload"] != "none" or values["in_process"]
    ):
        return None
    if values["shard_size"] is not None and (dp % values["shard_size"] or not values["zero"]):
        return None
    group = 1 + values["m"] // 2 if schedule == "interleaved_1f1b" and values["m"] % 2 else None
    return Case(
        dp=dp,
        tp=tp,
        pp=pp,
        schedule=schedule,
        chunks=chunks,
        group=group,
        layers=max(3, stages + values["uneven"]),
        batch=1 if values["m"] > 4 else 2,
        **values,
    )


def covering(rng: random.Random) -> list[Case]:
    """Cases that between them hold every possible pair of values of two dimensions.

    Greedy: of some random choices that contain a missing pair, take the one with most of them.
    """
    names = list(DIMENSIONS)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(DIMENSIONS[a])), range(len(DIMENSIONS[b])))
    }
    cases: list[Case] = []
    for pair in sorted(missing):
        if pair not in missing:
            continue
        best: tuple[int, Case | None, set[Any]] = (0, None, set())
        for _ in range(60):
            index = {name: rng.randrange(len(values)) for name, values in DIMENSIONS.items()}
            index.update(dict(pair))
            case = to_case({name: DIMENSIONS[name][i] for name, i in index.items()})
            if case is None:
                continue
            held = set(itertools.combinations(index.items(), 2)) & missing
            if len(held) > best[0]:
                best = len(held), case, held
        missing -= best[2] | {pair}  # a pair that no legal case holds is dropped here
        if best[1] is not None:
            cases.append(best[1])
    return cases


def layouts_in_full(rng: random.Random) -> Iterator[Case]:
    """The full product of layouts, schedules and micro-batches, other values drawn for each."""
    for layout, schedule, m in itertools.product(LAYOUTS, SCHEDULES, range(1, 10)):
        while True:
            choice = {name: rng.choice(values) for name, values in DIMENSIONS.items()}
            choice.update(layout=layout, schedule=schedule, m=m)
            case = to_case(choice)
            if case is not None:
                yield case
                break


def check(cases: list[Case], world: int) -> None:
    cases = [case for case in cases if case.world == world]
    assert cases
    results = run_world(world, run_cases, cases, timeout_s=30 + 10 * len(cases))
    for i, case in enumerate(cases):
        try:
            check_case(case, [outcomes[i] for outcomes in results])
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from None


@pytest.mark.parametrize("world", WORLDS)
def test_pairs(world: int) -> None:
    check(covering(random.Random(0)), world)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_full_product(world: int) -> None:
    check(list(layouts_in_full(random.Random(1))), world)


def test_in_process_pipeline_with_real_tensor_and_data_parallel_groups() -> None:
    """pp4 in one process per (dp, tp) coordinate, for every schedule."""
    cases = [
        Case(
            dp=2,
            tp=2,
            pp=4,
            m=5,
            schedule=schedule,
            chunks=chunks,
            in_process=True,
            sequence_parallel=True,
            layers=4 * chunks,
            masked=0.3,
        )
        for schedule, chunks in SCHEDULES
    ]
    check(cases, 4)
