"""Independent referees: a token game for lists of operations, and one for lowered programs.

They share no code with the package beyond the names of its data: tokens lie on a board, an
operation takes those it needs and puts down those it makes, and a rank does its list in order.
"""

import random
from collections import Counter, defaultdict, deque
from dataclasses import replace
from itertools import product

from megapipe.errors import ScheduleError
from megapipe.schedule.channels import Channel
from megapipe.schedule.ir import Kind, Op, Schedule, pack, packed, unpack
from megapipe.schedule.program import ActionKind, Program


def needs_and_makes(op: Op, schedule: Schedule, board: Counter):
    """Return the tokens that an op takes and makes; None where the schedule has no such op."""
    here = (op.stage, op.microbatch, op.slice)
    before = (op.stage - 1, op.microbatch, op.slice)
    later = (op.stage, op.microbatch, op.slice + 1)
    earlier = (op.stage, op.microbatch, op.slice - 1)
    first, last = op.slice == 0, op.slice == schedule.slices - 1
    recomputes = op.stage in schedule.recompute
    if op.kind == Kind.F:
        taken = [("activation", *before)] + [("keys", *earlier)] * (not first)
        made = [("activation", *here)] + [("keys", *here)] * (not last)
        if not schedule.forward_only:
            made.append(("input" if recomputes else "saved", *here))
        return taken, made
    if schedule.forward_only:
        return None
    if op.kind == Kind.R:
        return ([("input", *here)], [("saved", *here)]) if recomputes else None
    if op.kind == Kind.W:
        return [("queued", *here)], [("done", *here)]
    late = recomputes and not board[("saved", *here)]  # it recomputes as it begins
    end = op.stage == schedule.placement.stages - 1
    taken = [("input" if late else "saved", *here), ("activation" if end else "gradient", *here)]
    taken += [("keys' gradient", *later)] * (not last)
    made = [("gradient", *before), ("done" if op.kind == Kind.B else "queued", *here)]
    return taken, made + [("keys' gradient", *here)] * (not first)


def start_of(schedule: Schedule) -> Counter:
    """Return the board before the first move: the input of every slice."""
    units = product(range(schedule.microbatches), range(schedule.slices))
    return Counter(("activation", -1, *unit) for unit in units)


def end_of(schedule: Schedule) -> Counter:
    """Return the board after the last move of a whole step."""
    stages = schedule.placement.stages
    units = list(product(range(schedule.microbatches), range(schedule.slices)))
    if schedule.forward_only:
        return Counter(("activation", stages - 1, *unit) for unit in units)
    done = [("done", stage, *unit) for stage in range(stages) for unit in units]
    return Counter([("gradient", -1, *unit) for unit in units] + done)


def home_of(op, schedule: Schedule) -> int:
    """Return the rank that an operation belongs to."""
    direction = schedule.direction[op.microbatch] if schedule.direction else 0
    return schedule.placement.table[direction][op.stage]


def fault_of(ops: list[Op], rank: int, schedule: Schedule) -> str | None:
    """Return what is wrong with a list whatever the others do; None if nothing is."""
    for op, after in zip(ops, [*ops, None][1:], strict=True):
        if (
            op.stage >= schedule.placement.stages
            or op.microbatch >= schedule.microbatches
            or op.slice >= schedule.slices
            or needs_and_makes(op, schedule, Counter()) is None
        ):
            return f"{op}: no such operation"
        if home_of(op, schedule) != rank:
            return f"{op}: its stage lives elsewhere"
        if op.joined and (after is None or after.joined or after.microbatch == op.microbatch):
            return f"{op}: joined with {after}"
    return None


def game(schedule: Schedule) -> tuple[str | None, tuple[int, ...]]:
    """Return what is wrong, or None if the lists run to the end and leave exactly what a step
    should; and the most activations held per rank."""
    stages = range(schedule.placement.stages)
    if schedule.recompute and (schedule.slices > 1 or not schedule.recompute <= set(stages)):
        return "recomputation that cannot be", ()
    try:
        lists = [deque(unpack(code) for code in ops) for ops in schedule.ops]
    except ScheduleError:
        return "unknown kind", ()
    for rank, ops in enumerate(lists):
        fault = fault_of(list(ops), rank, schedule)
        if fault:
            return fault, ()
    board = start_of(schedule)
    held, peak = [0] * len(lists), [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(lists):
            while ops:
                group = [ops[0], ops[1]] if ops[0].joined else [ops[0]]
                moves = [needs_and_makes(op, schedule, board) for op in group]
                if any(board[token] < 1 for taken, _ in moves for token in taken):
                    break
                for op, (taken, made) in zip(group, moves, strict=True):
                    board.subtract(taken)
                    board.update(made)
                    late = op.kind in (Kind.I, Kind.B) and taken[0][0] == "input"
                    held[rank] += late or any(token[0] == "saved" for token in made)
                    peak[rank] = max(peak[rank], held[rank])
                    held[rank] -= any(token[0] == "done" for token in made)
                    ops.popleft()
                moved = True
    if any(lists):
        return "stuck", ()
    if +board != end_of(schedule):
        return "something is left over or missing", ()
    for most, limit in zip(peak, schedule.activation_bound or peak, strict=True):
        if most > limit:
            return "more activations than promised", ()
    return None, tuple(peak)


def play(schedule: Schedule) -> str | None:
    """Return what is wrong with a schedule; None if it can be executed."""
    return game(schedule)[0]


def peaks(schedule: Schedule) -> tuple[int, ...]:
    """Return the most activations held per rank, of a schedule that can be executed."""
    return game(schedule)[1]


def gradients_in_order(schedule: Schedule) -> bool:
    """Whether every copy of a stage adds up its gradients by micro-batch, late slices first."""
    for kinds in ((Kind.I, Kind.B), (Kind.W, Kind.B)):
        order = defaultdict(list)
        for rank, ops in enumerate(schedule.ops):
            for op in map(unpack, ops):
                if op.kind in kinds:
                    order[rank, op.stage].append((op.microbatch, -op.slice))
        if any(units != sorted(units) for units in order.values()):
            return False
    return True


def deal(empty: Schedule, rng: random.Random) -> Schedule:
    """Fill a schedule without operations: one random move after the other, until all are made."""
    todo = []
    shape = product(range(empty.placement.stages), range(empty.microbatches), range(empty.slices))
    for stage, microbatch, part in shape:
        kinds = [Kind.F]
        if not empty.forward_only:
            kinds += [Kind.R] * (stage in empty.recompute and rng.random() < 0.5)
            kinds += rng.choice([[Kind.B], [Kind.I, Kind.W]])
        todo += [Op(kind, stage, microbatch, part) for kind in kinds]
    lists = [[] for _ in range(empty.placement.ranks)]
    board = start_of(empty)
    eager = rng.choice([0.0, 0.5, 0.9])  # how often a backward that can run does

    def able(op):
        ahead = op._replace(kind=Kind.R)
        if op.kind in (Kind.I, Kind.B) and ahead in todo:
            return False
        return all(board[token] > 0 for token in needs_and_makes(op, empty, board)[0])

    def move(op, joined):
        taken, made = needs_and_makes(op, empty, board)
        board.subtract(taken)
        board.update(made)
        todo.remove(op)
        lists[home_of(op, empty)].append(op._replace(joined=joined))

    while todo:
        ready = [op for op in todo if able(op)]
        backward = [op for op in ready if op.kind != Kind.F]
        op = rng.choice(backward if backward and rng.random() < eager else ready)
        mates = [
            other
            for other in ready
            if other.microbatch != op.microbatch and home_of(other, empty) == home_of(op, empty)
        ]
        if mates and rng.random() < 0.3:
            move(op, True)
            op = rng.choice(mates)
        move(op, False)
    return replace(empty, ops=tuple(packed(pack(*op) for op in ops) for ops in lists))


def run_programs(
    schedule: Schedule, programs: tuple[Program, ...], channels: tuple[Channel, ...], seed: int
) -> None:
    """Run lowered programs in a random interleaving over rendezvous FIFO channels.

    Asserts that it ends with no send open, that every operation finds its inputs in hand, and that
    both ends of a channel mean the same message. Acks must count exactly the sends that the peer
    had received when it sent, and the depths must be exact.
    """
    rng = random.Random(seed)
    last = schedule.placement.stages - 1
    position = [0] * len(programs)
    posted = defaultdict(deque)  # (src, dst): sends whose receive is not posted yet
    received = Counter()  # (src, dst): messages taken so far
    acked = Counter()
    hands = [set() for _ in programs]  # tokens that a rank has
    inbox = Counter()  # (src, dst): received and not yet consumed
    deepest = Counter()
    sent = Counter()

    def home(stage, unit):
        return home_of(Op(Kind.F, stage, *unit), schedule)

    live = [rank for rank, program in enumerate(programs) if program.actions]
    while live:
        able = []
        for rank in live:
            action = programs[rank].actions[position[rank]]
            if action.do != ActionKind.RECV or posted[action.peer, rank]:
                able.append(rank)
        assert able, "every rank waits"
        rank = rng.choice(able)
        do, kind, stage, *unit, peer, acks = programs[rank].actions[position[rank]]
        message = (kind, stage, *unit)
        if do == ActionKind.RECV:
            arrived, peer_had_received = posted[peer, rank].popleft()
            assert arrived == message
            received[peer, rank] += 1
            acked[rank, peer] += acks
            assert acked[rank, peer] == peer_had_received
            assert message not in hands[rank]
            hands[rank].add(message)
            inbox[peer, rank] += 1
            deepest[peer, rank] = max(deepest[peer, rank], inbox[peer, rank])
        elif do == ActionKind.SEND:
            assert home(stage + 1 if kind == Kind.F else stage - 1, unit) == peer != rank
            hands[rank].remove(message)
            posted[rank, peer].append((message, received[peer, rank]))
            sent[rank, peer] += 1
        else:
            assert home(stage, unit) == rank
            if kind == Kind.F and stage > 0:
                hands[rank].remove((Kind.F, stage - 1, *unit))
                inbox[home(stage - 1, unit), rank] -= 1
            if kind in (Kind.I, Kind.B) and stage < last:
                hands[rank].remove((Kind.I, stage + 1, *unit))
                inbox[home(stage + 1, unit), rank] -= 1
            if kind == Kind.F and stage < last:
                hands[rank].add(message)
            if kind in (Kind.I, Kind.B) and stage > 0:
                hands[rank].add((Kind.I, stage, *unit))
        position[rank] += 1
        if position[rank] == len(programs[rank].actions):
            live.remove(rank)
    assert not any(posted.values()), "a send is never received"
    assert not any(hands), "a message is never used"
    assert {(c.src, c.dst): (c.messages, c.depth) for c in channels} == {
        pair: (count, deepest[pair]) for pair, count in sent.items()
    }
