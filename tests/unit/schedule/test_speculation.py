"""The part of a step that all ranks can give up together."""

from collections import Counter, deque

import pytest
from hypothesis import given, settings

from megapipe.schedule.data_parallel import ReplicaPolicy, with_zero_actions
from megapipe.schedule.generators import build, names
from megapipe.schedule.ir import Kind, Op, Schedule
from megapipe.schedule.lower import lower
from megapipe.schedule.program import Action, ActionKind
from megapipe.schedule.speculation import arriving, cut, speculation
from tests.parity.tiers import in_parts
from tests.unit.schedule.schedule_cases import all_small, of, schedules


def inputs(op: Op) -> list[tuple[int, int, int]]:
    """Return the forwards that a forward needs: (stage, micro-batch, slice)."""
    before = [(op.stage - 1, op.microbatch, op.slice)] if op.stage else []
    return before + [(op.stage, op.microbatch, op.slice - 1)] * (op.slice > 0)


def check(schedule: Schedule) -> None:
    counts = speculation(schedule)
    ranks = range(schedule.placement.ranks)
    lists = [schedule.rank_ops(rank) for rank in ranks]
    inside = [ops[:count] for ops, count in zip(lists, counts, strict=True)]
    made = {(op.stage, op.microbatch, op.slice) for ops in inside for op in ops}
    for ops in inside:
        for op in ops:
            assert op.kind == Kind.F
            assert not op.joined
            assert made.issuperset(inputs(op)), "closed"
    for ops, count in zip(lists, counts, strict=True):
        if count < len(ops):
            following = ops[count]
            forward = following.kind == Kind.F and not following.joined
            assert not forward or not made.issuperset(inputs(following)), "as long as can be"
    check_messages(schedule, counts)


def check_messages(schedule: Schedule, counts: tuple[int, ...]) -> None:
    """Assert that the prefixes' actions run to their ends by themselves, and that the channels then
    hold what the ranks expect to arrive and have not taken."""
    prefixes: list[deque[Action]] = []
    programs = with_zero_actions(lower(schedule), schedule, ReplicaPolicy(2, 1, chunked_loss=True))
    for whole, count in zip(programs, counts, strict=True):
        actions = whole.actions[: cut(whole, count)]
        assert sum(action.do == ActionKind.COMPUTE for action in actions) == count
        assert not {ActionKind.ALLOC_GRADS, ActionKind.REDUCE} & {action.do for action in actions}
        rest = whole.actions[len(actions) :]
        assert not rest or rest[0].do != ActionKind.SEND, "what the last one makes is sent"
        prefixes.append(deque(actions))
    channels: dict[tuple[int, int], deque[tuple[int, ...]]] = {}
    sent: Counter[tuple[int, int]] = Counter()
    taken: Counter[tuple[int, int]] = Counter()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(prefixes):
            while actions:
                action = actions[0]
                line = (action.peer, rank) if action.do == ActionKind.RECV else (rank, action.peer)
                queue = channels.setdefault(line, deque())
                if action.do == ActionKind.SEND:
                    queue.append(action[1:5])
                    sent[line] += 1
                elif action.do == ActionKind.RECV:
                    if not queue:
                        break
                    assert queue.popleft() == action[1:5], "first in, first out"
                    taken[line] += 1
                actions.popleft()
                moved = True
    assert not any(prefixes), "a prefix waits for what is not in one"
    for rank in range(schedule.placement.ranks):
        expected = arriving(schedule, rank, counts)
        assert +expected == Counter({src: n for (src, dst), n in sent.items() if dst == rank})
    for line, number in taken.items():
        assert number <= sent[line]


@in_parts("name", names(), default=4, full=1)
def test_registered_schedules(name: str) -> None:
    for schedule in all_small(name, ranks=4, microbatches=3):
        check(schedule)


@settings(max_examples=60)
@given(schedules())
def test_any_schedule(schedule: Schedule) -> None:
    check(schedule)


@pytest.mark.parametrize(
    ("name", "microbatches", "counts"),
    [
        ("1f1b", 8, (4, 3, 2, 1)),
        ("gpipe", 8, (8, 8, 8, 8)),
        ("zb_h1", 8, (4, 3, 2, 1)),
        ("zb_h2", 8, (7, 5, 3, 1)),
    ],
)
def test_it_is_the_warm_up(name: str, microbatches: int, counts: tuple[int, ...]) -> None:
    assert speculation(build(name, ranks=4, microbatches=microbatches)) == counts


def test_a_forward_that_needs_one_behind_a_backward_is_not_in_it() -> None:
    """Rank 0 has stages 0 and 3. Its 3F0 can run, but 0F2 stands behind a backward."""
    schedule = of("0F0 0F1 3F0 3B0 0F2 3F1 3B1 3F2 3B2 0B0 0B1 0B2/"
                  "1F0 2F0 1F1 2F1 1F2 2F2 2B0 1B0 2B1 1B1 2B2 1B2", 3)  # fmt: skip
    assert speculation(schedule) == (3, 4)


def test_joined_operations_end_it() -> None:
    assert speculation(of("0F0 0F1 0B0 0B1/1F0 1F1+1B0 1B1", 2)) == (2, 1)


def test_messages_that_a_rank_has_not_taken_are_still_coming() -> None:
    """1f1b on 4 ranks: each rank makes one more than the next one takes."""
    schedule = build("1f1b", ranks=4, microbatches=8)
    counts = speculation(schedule)
    assert [arriving(schedule, rank, counts) for rank in range(4)] == [{}, {0: 4}, {1: 3}, {2: 2}]
    for program, count in zip(lower(schedule), counts, strict=True):
        actions = program.actions[: cut(program, count)]
        received = sum(action.do == ActionKind.RECV for action in actions)
        assert received == (count if program.rank else 0)
