"""Stages that span all ranks: the M shape in proof, simulation, memory, files and programs."""

import random
from fractions import Fraction

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.commands.scenario import placement_names
from megapipe.schedule.cost import Cost
from megapipe.schedule.ir import Kind, Op, Schedule, pack, packed
from megapipe.schedule.lower import lower
from megapipe.schedule.memory import peak_held, traffic, weight_replicas
from megapipe.schedule.placement import Placement, loop, m_shape, mirrored
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.render.bars import bars, most_chunks
from megapipe.schedule.text import from_csv, to_csv, to_torch_csv
from megapipe.schedule.timing.idle import Idle, idle
from megapipe.schedule.timing.opportunistic import deviate
from megapipe.schedule.timing.simulate import simulate
from tests.unit.schedule.schedule_cases import of

ONE = "0F0 1F0 3F0 3B0 1B0 0B0/0F0 2F0 3F0 3B0 2B0 0B0"
"""One micro-batch on the M shape of two ranks."""


def test_the_m_shape():
    shape = m_shape(3)
    assert shape == Placement(3, ((0, 0, 1, 2, 0),), frozenset({0, 4}))
    assert [shape.stages_of(rank) for rank in range(3)] == [(0, 1, 4), (0, 2, 4), (0, 3, 4)]
    assert (shape.holders(0), shape.holders(2)) == ((0, 1, 2), (1,))
    assert shape.stage_shares == (Fraction(1, 3),) * 5  # of an embedding: one rank's shard
    assert Placement(2, ((0, 0, 1),), frozenset({0})).stage_shares == (Fraction(1, 2),) * 3
    assert (placement_names(shape), most_chunks(shape)) == (("m",), 3)
    assert placement_names(Placement(2, ((0, 0, 1),), frozenset({0}))) == ("own",)


def test_messages_to_and_from_all_ranks():
    shape = m_shape(3)
    assert shape.messages(0, 1) == shape.messages(0, 3) == []
    assert shape.messages(1, 2) == [(0, 1)]
    assert shape.messages(3, 4) == [(2, 0), (2, 1)]
    assert shape.messages(1, 0) == [(0, 1), (0, 2)]
    assert loop(2).messages(1, 0) == [(1, 0)]
    assert mirrored(loop(2)).messages(0, 1, 1) == [(1, 0)]
    assert traffic(of(ONE, 1, m_shape(2))) == {(0, 1): 2, (1, 0): 2}


@pytest.mark.parametrize(
    ("table", "spanning", "message"),
    [
        (((0, 1),), {2}, "spanning stage 2 does not exist; stages go from 0 to 1"),
        (((0, 1),), {1}, "stage 1 spans all ranks; the table needs one direction, and rank 0"),
        (((0, 1), (0, 1)), {0}, "stage 0 spans all ranks; the table needs one direction"),
    ],
)
def test_tables_that_cannot_be(table, spanning, message):
    with pytest.raises(ScheduleError, match=message):
        Placement(2, table, frozenset(spanning))


def test_what_cannot_be_combined_with_spanning_stages():
    for what, fields in [
        ("slices", {"slices": 2}),
        ("micro-batches of unequal size", {"sizes": (Fraction(1, 2),)}),
        ("recomputation", {"recompute": frozenset({1})}),
    ]:
        with pytest.raises(ScheduleError, match=f"stage 0 spans all ranks; {what} cannot"):
            of(ONE, 1, m_shape(2), **fields)
    with pytest.raises(ScheduleError, match="joined operations cannot be combined with that"):
        of(ONE.replace("0F0 1F0", "0F0+1F0"), 1, m_shape(2))


def test_operations_of_all_ranks_start_together():
    timeline = simulate(of(ONE, 1, m_shape(2)), Cost(F=1, B=2))
    assert list(timeline.starts[0]) == [0, 1, 3, 4, 8, 10]
    assert list(timeline.starts[1]) == [0, 2, 3, 4, 6, 10]
    late = simulate(of(ONE, 1, m_shape(2)), Cost(F=1, B=2, latency=3))
    assert list(late.starts[0]) == [0, 1, 2 + 3 + 1 + 3, 10, 12 + 2 + 3, 19 + 3]
    assert timeline.makespan == 12


def test_idle_time_until_all_ranks_have_come():
    rows = ONE.split("/")
    twice = "/".join(row + " " + row.replace("0 ", "1 ")[:-1] + "1" for row in rows)
    schedule = of(twice, 2, m_shape(2))
    assert idle(simulate(schedule, Cost(F=1, B=2)))[0] == Idle(1, 0, 2, 2 + 1)
    late = idle(simulate(schedule, Cost(F=1, B=2, latency=3)))[0]
    assert late == Idle(1 + 6, 2 * 3 + 3, 2 + 6, 2 + 1 + 3)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (ONE[: -len(" 0B0")], r"rank 1: 0B0 \(or an I and a W\) is missing from its list of 5"),
        (ONE.replace("/0F0 2F0", "/2F0 0F0"), "deadlock: rank 0 op 1 .* waits for|deadlock"),
        (ONE.replace("0F0 1F0", "0F0 0F0", 1), "duplicate of op 0"),
        (ONE.replace("/0F0 2F0 3F0 3B0", "/0F0 2F0 3F0 3I0 3W0"), "rank 0 has 3B0 .* has 3I0"),
        (ONE.replace("3F0 3B0 2B0", "3B0 3F0 2B0"), "rank 1, op 2 .*: it needs 3F0 first"),
        (ONE.replace("1F0", "2F0"), "stage 2 is on rank 1"),
    ],
)
def test_lists_that_cannot_run(lists, message):
    with pytest.raises(ScheduleError, match=message):
        validate(of(lists, 1, m_shape(2)))


def test_ranks_that_meet_in_different_order():
    lists = "0F0 0F1 1F0 1F1 3F0 3B0 3F1 3B1 1B0 0B0 1B1 0B1/0F1 0F0 2F0 2F1 3F0 3B0 3F1 3B1 2B0 "
    with pytest.raises(ScheduleError, match=r"rank 0 op 0 \(0F0\) waits for 0F0, op 1 of rank 1"):
        validate(of(lists + "0B0 2B1 0B1", 2, m_shape(2)))


def random_lists(rng: random.Random, ranks: int, microbatches: int) -> list[list[Op]]:
    """Make lists of the M shape in a random order that can be executed."""
    last = ranks + 1
    chain = [(Kind.F, s) for s in range(last + 1)] + [
        (Kind.I, s) for s in reversed(range(last + 1))
    ]
    lists: list[list[Op]] = [[] for _ in range(ranks)]
    left = {(m, None): list(chain) for m in range(microbatches)}
    while left:
        key = rng.choice(sorted(left, key=str))
        microbatch, rank = key
        kind, stage = left[key].pop(0)
        where = range(ranks) if stage in (0, last) else [stage - 1]
        for each in where if rank is None else [rank]:
            lists[each].append(Op(kind, stage, microbatch))
            if kind == Kind.I:
                left.setdefault((microbatch, each), []).append((Kind.W, stage))
        left = {key: ops for key, ops in left.items() if ops}
    return lists


def referee(lists: list[list[Op]], latency: int) -> list[list[int]] | None:
    """Find the starts by raising them until nothing has to move: an operation takes 1. None: they
    never stop."""
    last = len(lists) + 1
    at = [[0] * len(ops) for ops in lists]
    for _ in range(sum(map(len, lists)) * (2 + latency)):
        where = {}
        for rank, ops in enumerate(lists):
            for index, op in enumerate(ops):
                where.setdefault(op, []).append((rank, at[rank][index]))
        before = [list(row) for row in at]
        for rank, ops in enumerate(lists):
            for index, op in enumerate(ops):
                times = [at[rank][index]] + [at[rank][index - 1] + 1] * (index > 0)
                if op.kind in (Kind.F, Kind.I):
                    times += [time for _, time in where[op]]
                    source = op._replace(stage=op.stage + (1 if op.kind == Kind.I else -1))
                    for home, time in where.get(source, ()):
                        far = source.stage not in (0, last) and (
                            op.stage in (0, last) or home != rank
                        )
                        times.append(time + 1 + latency * far)
                at[rank][index] = max(times)
        if before == at:
            return at
    return None


@pytest.mark.parametrize("seed", range(30))
def test_random_lists_against_a_referee(seed):
    rng = random.Random(seed)
    ranks, microbatches, latency = rng.choice([2, 3]), rng.choice([1, 2, 3]), rng.choice([0, 2])
    lists = random_lists(rng, ranks, microbatches)
    if seed % 3 == 2:  # two neighbours change places, which may or may not be possible
        ops = rng.choice(lists)
        index = rng.randrange(len(ops) - 1)
        ops[index : index + 2] = reversed(ops[index : index + 2])
    rows = tuple(packed(pack(*op) for op in ops) for ops in lists)
    schedule = Schedule("x", m_shape(ranks), microbatches, rows)
    expected = referee(lists, latency)
    try:
        validate(schedule)
    except ScheduleError as error:
        needs_own = "it needs" in str(error)  # of the same stage and rank, which the referee skips
        assert expected is None or needs_own
    else:
        assert expected is not None
        timeline = simulate(schedule, Cost(latency=latency))
        assert [list(starts) for starts in timeline.starts] == expected


def test_memory_of_a_shard():
    schedule = of(ONE, 1, m_shape(2))
    assert peak_held(schedule) == (1, 1)
    assert weight_replicas(schedule) == (1, 1)
    assert validate(schedule).peak_held == (3, 3)


def test_files_name_the_spanning_stages():
    schedule = of(ONE, 1, m_shape(2))
    text = to_csv(schedule)
    assert text.splitlines() == [
        "# spanning 0 3",
        *(row.replace(" ", ",") for row in ONE.split("/")),
    ]
    assert from_csv(text).placement == m_shape(2)
    assert from_csv(text).ops == schedule.ops
    with pytest.raises(ScheduleError, match="all operations of a stage on a micro-batch"):
        from_csv(text.partition("\n")[2])
    with pytest.raises(ScheduleError, match="cannot run a stage that spans all ranks"):
        to_torch_csv(schedule)


def test_drawings_show_the_shard_on_every_rank():
    timeline = simulate(of(ONE, 1, m_shape(2)))
    chunks = [[bar.parts[0].chunk for bar in bars(timeline, rank)] for rank in (0, 1)]
    assert chunks == [[0, 1, 2, 2, 1, 0]] * 2


def test_programs_and_deviations_are_refused():
    schedule = of(ONE, 1, m_shape(2))
    with pytest.raises(ScheduleError, match=r"stage 0 spans all ranks; .*, but not trained"):
        lower(schedule)
    with pytest.raises(ScheduleError, match="cannot deviate if a stage spans all ranks"):
        deviate(schedule, Cost(), 2)


@pytest.mark.parametrize(
    ("cost", "what"),
    [
        (Cost(latency={(0, 1): 1}), "unequal links"),
        (Cost(bandwidth={(0, 1): 1}), "unequal links"),
        (Cost(reduce=1), "gathers and reductions"),
    ],
)
def test_costs_that_are_not_simulated(cost, what):
    with pytest.raises(ScheduleError, match=rf"{what} cannot be simulated if a stage \(0\) spans"):
        simulate(of(ONE, 1, m_shape(2)), cost)
