"""Mistakes in schedules with updates, and an independent referee who sees the same ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.async_schedules.async_schedule import finite, stream
from megapipe.schedule.async_schedules.orders import build
from megapipe.schedule.async_schedules.policies import (
    ALTERNATING,
    POLICIES,
    Lists,
    VersionPolicy,
    policy,
)
from megapipe.schedule.async_schedules.shared_updates import check_shared_updates
from megapipe.schedule.ir import Kind, Op, Read, Schedule, pack, packed, unpack
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.text import from_csv, to_csv
from tests.unit.schedule.async_schedules.version_game import play_versions

Step = tuple[Op, Read]
Change = Callable[[list[Step]], object]


def split(schedule: Schedule, rng: random.Random) -> Schedule:
    """Split backwards into two parts and put recomputations ahead of backwards. The second part
    waits for a while, but not for longer than its window."""
    assert schedule.updates is not None
    ops, reads = [], []
    for rank, own in enumerate(schedule.updates.reads):
        steps: list[Step] = []
        waiting: list[Step] = []
        for op, read in zip(schedule.rank_ops(rank), own, strict=True):
            if op.kind == Kind.U or (op.kind == Kind.B and rng.random() < 0.4):
                steps += waiting
                waiting = []
            if op.kind == Kind.B:
                steps += [(op._replace(kind=Kind.R), read)] * rng.randrange(2)
                if rng.random() < 0.7:
                    waiting.append((op._replace(kind=Kind.W), read))
                    op = op._replace(kind=Kind.I)
            steps.append((op, read))
        ops.append(packed(pack(*op) for op, _ in steps + waiting))
        reads.append(tuple(read for _, read in steps + waiting))
    return replace(
        schedule,
        ops=tuple(ops),
        recompute=frozenset(range(schedule.placement.stages)),
        updates=replace(schedule.updates, reads=tuple(reads)),
    )


def stashed(weights: str = "stash", m: int = 2, windows: int = 3) -> Schedule:
    return finite(stream(build("1f1b", 2, m), policy(weights)), windows)


def changed(schedule: Schedule, rank: int, change: Change) -> Schedule:
    assert schedule.updates is not None
    steps = list(zip(schedule.rank_ops(rank), schedule.updates.reads[rank], strict=True))
    change(steps)
    ops, reads = list(schedule.ops), list(schedule.updates.reads)
    ops[rank] = packed(pack(*op) for op, _ in steps)
    reads[rank] = tuple(read for _, read in steps)
    return replace(schedule, ops=tuple(ops), updates=replace(schedule.updates, reads=tuple(reads)))


def at(steps: list[Step], text: str) -> int:
    return next(n for n, (op, _) in enumerate(steps) if str(op) == text)


def reading(text: str, read: Read) -> Change:
    def change(steps: list[Step]) -> None:
        place = at(steps, text)
        steps[place] = steps[place][0], read

    return change


def moving(text: str, before: str) -> Change:
    def change(steps: list[Step]) -> None:
        step = steps.pop(at(steps, text))
        steps.insert(at(steps, before), step)

    return change


def both(first: Change, second: Change) -> Change:
    return lambda steps: (first(steps), second(steps))


MISTAKES: dict[str, tuple[int, Change, str]] = {
    "no update": (
        0,
        lambda s: s.pop(at(s, "0U1")),
        r"\(0F5\): it reads version 2 of stage 0, which does not exist yet; the newest is 1",
    ),
    "no last update": (1, lambda s: s.pop(at(s, "1U2")), "rank 1: 1U2 is missing"),
    "an update twice": (
        0,
        lambda s: s.insert(at(s, "0U1"), (Op(Kind.U, 0, 0), Read(1))),
        r"rank 0, op \d+ \(0U0\): stage 0 was updated for this window already",
    ),
    "updates out of turn": (1, moving("1U1", "1U0"), r"\(1U1\): it needs 1U0 first"),
    "an update too early": (
        0,
        moving("0U0", "0B1"),
        r"\(0U0\): it comes before 1 of the window's",
    ),
    "an update of another stage": (
        0,
        reading("0U0", Read(2)),
        r"\(0U0\): it makes version 1, not 2",
    ),
    "a stage of another rank": (
        1,
        lambda s: s.insert(0, (Op(Kind.U, 0, 0), Read(1))),
        r"\(0U0\): stage 0 is on rank 0",
    ),
    "a version that is not made": (
        0,
        both(reading("0F4", Read(2)), reading("0B4", Read(2))),
        r"rank 0, op \d+ \(0F4\): it reads version 2 of stage 0, which does not exist yet",
    ),
    "a version below 0": (0, reading("0F0", Read(-1)), r"\(0F0\): it reads version -1"),
    "another version in the backward": (
        0,
        reading("0B2", Read(1)),
        r"\(0B2\): it reads version 1 of stage 0, but 0F2 has read 0",
    ),
    "an update after the reader": (
        1,
        moving("1U0", "1B2"),
        r"\(1F2\): it reads version 1 of stage 1, which does not exist yet",
    ),
    "more weights than promised": (
        1,
        both(reading("1F5", Read(0)), reading("1B5", Read(0))),
        r"rank 1, op \d+ \(1U0\): from .*, the rank keeps 2 versions of stage 1, more than the 1",
    ),
    "a backward of the next window": (
        1,
        lambda s: (
            (moving("1F2", "1B1")(s), moving("1B2", "1B1")(s), reading("1F2", Read(0))(s))
            and reading("1B2", Read(0))(s)
        ),
        r"\(1B1\): it is of window 0, but a backward of window 1 comes before",
    ),
    "no such window": (
        0,
        lambda s: s.append((Op(Kind.U, 0, 9), Read(10))),
        r"\(0U9\): out of range",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    rank, change, said = MISTAKES[name]
    with pytest.raises(ScheduleError, match=said):
        validate(changed(stashed(), rank, change))


def test_parts_of_a_backward_read_what_its_forward_read() -> None:
    whole = split(stashed(windows=4), random.Random(6))
    validate(whole)
    assert {op.kind for op in whole.rank_ops(0)} == set(Kind)
    for text in last_of_each_kind(whole.rank_ops(0)):
        number = int(text[2:])
        said = rf"\({text}\): it reads version 0 of stage 0, but 0F{number} has read [1-9]"
        with pytest.raises(ScheduleError, match=said):
            validate(changed(whole, 0, reading(text, Read(0))))
    where = at([(op, Read(0)) for op in whole.rank_ops(0)], "0U2")
    last = max(n for n, op in enumerate(whole.rank_ops(0)) if op.kind == Kind.W and n < where)
    with pytest.raises(ScheduleError, match=r"\(0U2\): it comes before 1 of the window's"):
        validate(changed(whole, 0, lambda s: s.insert(where, s.pop(last))))


def last_of_each_kind(ops: list[Op]) -> Iterator[str]:
    """Yield the last operation of each kind of part."""
    for kind in (Kind.I, Kind.W, Kind.R):
        yield str([op for op in ops if op.kind == kind][-1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"window": 4}, "6 micro-batches are not a multiple of the 4 per update window"),
        ({"kept": (1,)}, "`kept` has 1 numbers for 2 ranks"),
        ({"reads": ((Read(0),), (Read(0),))}, "rank 0: `reads` has 1 versions for 15 operations"),
    ],
)
def test_sizes(change: dict[str, object], said: str) -> None:
    schedule = stashed()
    assert schedule.updates is not None
    with pytest.raises(ScheduleError, match=said):
        validate(replace(schedule, updates=replace(schedule.updates, **change)))


def test_ranks_of_a_stage_that_meet_must_not_wait_for_each_other() -> None:
    """The last stage runs a forward first whose micro-batch is in the next window of rank 1, which
    waits for rank 2, and that for a backward behind the forward."""
    given = stream(build("1f1b_rr", 4, 6, ranks_per_stage=[1, 2, 1]), policy("double_buffer"))
    schedule = finite(given, 3)
    check_shared_updates(schedule)
    for forward in ("2F6", "2F7", "2F8"):
        schedule = changed(schedule, 3, moving(forward, "2B5"))
    validate(schedule)
    with pytest.raises(ScheduleError, match=r"rank 1 at 1F8, rank 2 at 1B5, rank 3 at 2F8 wait"):
        check_shared_updates(schedule)


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (2, r"op 0 of an update window \(0F1\): .* version -1 .*, but version 0 1 window later"),
        (5, r"op 0 of an update window \(0F1\): .* version 0 .*, but version -1 1 window later"),
        (7, r"op 2 of an update window \(0F2\): .* version 0 .*, but version -1 2 windows later"),
    ],
)
def test_windows_that_are_not_alike_are_refused(turns: int, said: str) -> None:
    """The policy reads an older version in one of `turns` windows."""

    def odd(lists: Lists, op: Op) -> Read:
        forward = lists.forward(op)
        older = lists.window_of(op) % turns == 0
        return Read(max(0, lists.newest(forward) - older))

    with pytest.raises(ScheduleError, match=rf"weights odd: rank 0, {said}"):
        stream(build("1f1b", 2, 2), VersionPolicy("odd", odd))


def test_updates_without_windows() -> None:
    with pytest.raises(ScheduleError, match=r"updates \(U\) are only in a schedule"):
        validate(replace(stashed(), updates=None))


def disturbed(schedule: Schedule, rng: random.Random) -> Schedule:
    """Make a random change or none: a version, an update moved, dropped or doubled, a swap."""
    rank = rng.randrange(schedule.placement.ranks)

    def change(steps: list[Step]) -> None:
        place = rng.randrange(len(steps))
        updates = [n for n, (op, _) in enumerate(steps) if op.kind == Kind.U]
        what = rng.randrange(6)
        if what == 0:
            op, read = steps[place]
            steps[place] = op, read._replace(version=max(0, read.version + rng.choice((-1, 1))))
        elif what == 1:
            op, read = steps[place]
            if op.kind != Kind.U:
                steps[place] = op, read._replace(ahead=read.ahead + Fraction(1, 2))
        elif what == 2:
            step = steps.pop(rng.choice(updates))
            steps.insert(min(place, len(steps)), step)
        elif what == 3:
            steps.pop(rng.choice(updates))
        elif what == 4 and place + 1 < len(steps):
            steps[place], steps[place + 1] = steps[place + 1], steps[place]

    return changed(schedule, rank, change)


def refusal(schedule: Schedule) -> str | None:
    """Return what the proof says against a schedule; None if nothing."""
    try:
        validate(schedule)
    except ScheduleError as error:
        return str(error)
    return None


def compare_with_game(seeds: range) -> tuple[int, int]:
    """Compare the proof with the game; return the numbers of valid and of invalid schedules."""
    right = wrong = 0
    kinds: set[Kind] = set()
    for seed in seeds:
        rng = random.Random(seed)
        name = rng.choice(list(POLICIES))
        order = rng.choice(POLICIES[name].orders)
        p, m, advance = rng.randrange(1, 4), rng.randrange(1, 5), rng.randrange(2)
        try:
            given = stream(
                build(order, p, m, extra_warmup=advance if order in ALTERNATING else 0),
                policy(name),
            )
        except ScheduleError:
            continue
        schedule = finite(given, rng.randrange(1, 4))
        if rng.random() < 0.5:
            schedule = split(schedule, rng)
        schedule = disturbed(schedule, rng)
        kinds.update(op.kind for rank in range(p) for op in schedule.rank_ops(rank))
        fault = play_versions(schedule)
        said = refusal(schedule)
        assert (fault is None) == (said is None), (seed, fault, said)
        right, wrong = right + (said is None), wrong + (said is not None)
    assert kinds == set(Kind)
    return right, wrong


def test_the_referee_agrees() -> None:
    right, wrong = compare_with_game(range(120))
    assert min(right, wrong) > 20


@pytest.mark.slow
def test_the_referee_agrees_on_2000() -> None:
    right, wrong = compare_with_game(range(1000, 3500))
    assert right + wrong >= 2000


@pytest.mark.parametrize("weights", POLICIES)
def test_text(weights: str) -> None:
    """What export writes is read as it was; promises of numbers are not in it."""
    order = POLICIES[weights].orders[0]
    schedule = finite(stream(build(order, 3, 4), policy(weights)), 4)
    read = from_csv(to_csv(schedule), name=schedule.name)
    assert schedule.updates is not None
    assert read == replace(schedule, updates=replace(schedule.updates, kept=None))
    validate(read)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0,0U0", "an update needs the line '# window N'"),
        ("0F0@0,0B0@0", "a version needs the line '# window N'"),
        ("# window 1\n0F0@0,0B0,0U0", "0B0: it does not say which weight version it reads, as"),
        ("# window\n0F0", "has no number"),
    ],
)
def test_text_that_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        from_csv(text)


def test_operations_read_as_they_are_written() -> None:
    assert str(unpack(pack(Kind.U, 2, 4))) == "2U4"
    assert f"{Read(3)} {Read(3, Fraction(1))} {Read(3, Fraction(-3, 2))}" == "3 3+1 3-3/2"
