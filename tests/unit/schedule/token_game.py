"""Independent referees: a token game for lists of operations, and one for lowered programs.

They share no code with the package beyond the names of its data: tokens lie on a board, an
operation takes those it needs and puts down those it makes, and a rank does its list in order.
"""

import random
from collections import Counter, defaultdict, deque
from itertools import product

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Kind, Schedule, unpack
from megapipe.schedule.lower import Channel, Do, Program


def needs_and_makes(kind, stage, microbatch, stages, forward_only):
    """Tokens taken and put down by an operation; None for a kind that the game lacks."""
    if kind == Kind.F:
        made = [("activation", stage, microbatch)]
        if not forward_only:
            made.append(("saved", stage, microbatch))
        return [("activation", stage - 1, microbatch)], made
    if forward_only:
        return None
    gradient = [("gradient", stage - 1, microbatch)]
    back = [("saved", stage, microbatch), ("gradient", stage, microbatch)]
    if stage == stages - 1:
        back[1] = ("activation", stage, microbatch)
    if kind == Kind.B:
        return back, [*gradient, ("done", stage, microbatch)]
    if kind == Kind.I:
        return back, [*gradient, ("queued", stage, microbatch)]
    if kind == Kind.W:
        return [("queued", stage, microbatch)], [("done", stage, microbatch)]
    return None


def play(schedule: Schedule) -> str | None:
    """None if the lists run to the end and leave exactly what a step should; else what is wrong."""
    stages, microbatches = schedule.placement.stages, schedule.microbatches
    board = Counter(("activation", -1, microbatch) for microbatch in range(microbatches))
    lists = [deque(ops) for ops in schedule.ops]
    held = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(lists):
            while ops:
                try:
                    kind, stage, microbatch, part = unpack(ops[0])
                except ScheduleError:
                    return "unknown kind"
                move = needs_and_makes(kind, stage, microbatch, stages, schedule.forward_only)
                if move is None or part or stage >= stages:
                    return "no such operation"
                if schedule.placement.table[0][stage] != rank:
                    return "its stage lives elsewhere"
                taken, made = move
                if any(board[token] < 1 for token in taken):
                    break
                board.subtract(taken)
                board.update(made)
                held[rank] += sum(token[0] == "saved" for token in made)
                held[rank] -= sum(token[0] == "done" for token in made)
                if schedule.held_limit and held[rank] > schedule.held_limit[rank]:
                    return "more activations than promised"
                ops.popleft()
                moved = True
    if any(lists):
        return "stuck"
    if schedule.forward_only:
        wanted = Counter(("activation", stages - 1, mb) for mb in range(microbatches))
    else:
        wanted = Counter(("gradient", -1, mb) for mb in range(microbatches))
        wanted.update(("done", *where) for where in product(range(stages), range(microbatches)))
    return None if +board == wanted else "something is left over or missing"


def run_programs(
    schedule: Schedule, programs: tuple[Program, ...], channels: tuple[Channel, ...], seed: int
) -> None:
    """Run lowered programs in a random interleaving over rendezvous FIFO channels.

    Asserts that it ends with no send open, that every operation finds its inputs in hand, that
    both ends of a channel mean the same message, that acks count exactly the sends that the peer
    had received when it sent, and that the depths are exact.
    """
    rng = random.Random(seed)
    stages, home = schedule.placement.stages, schedule.placement.table[0]
    position = [0] * len(programs)
    posted = defaultdict(deque)  # (src, dst): sends whose receive is not posted yet
    received = Counter()  # (src, dst): messages taken so far
    acked = Counter()
    hands = [set() for _ in programs]  # tokens that a rank has
    inbox = Counter()  # (src, dst): received and not yet consumed
    deepest = Counter()
    sent = Counter()
    live = [rank for rank, program in enumerate(programs) if program.actions]
    while live:
        able = []
        for rank in live:
            action = programs[rank].actions[position[rank]]
            if action.do != Do.RECV or posted[action.peer, rank]:
                able.append(rank)
        assert able, "every rank waits"
        rank = rng.choice(able)
        do, kind, stage, microbatch, _, peer, acks = programs[rank].actions[position[rank]]
        message = (kind, stage, microbatch)
        if do == Do.RECV:
            arrived, peer_had_received = posted[peer, rank].popleft()
            assert arrived == message
            received[peer, rank] += 1
            acked[rank, peer] += acks
            assert acked[rank, peer] == peer_had_received
            assert message not in hands[rank]
            hands[rank].add(message)
            inbox[peer, rank] += 1
            deepest[peer, rank] = max(deepest[peer, rank], inbox[peer, rank])
        elif do == Do.SEND:
            assert home[stage + 1 if kind == Kind.F else stage - 1] == peer != rank
            hands[rank].remove(message)
            posted[rank, peer].append((message, received[peer, rank]))
            sent[rank, peer] += 1
        else:
            if kind == Kind.F and stage > 0:
                hands[rank].remove((Kind.F, stage - 1, microbatch))
                inbox[home[stage - 1], rank] -= 1
            if kind in (Kind.I, Kind.B) and stage < stages - 1:
                hands[rank].remove((Kind.I, stage + 1, microbatch))
                inbox[home[stage + 1], rank] -= 1
            if kind == Kind.F and stage < stages - 1:
                hands[rank].add(message)
            if kind in (Kind.I, Kind.B) and stage > 0:
                hands[rank].add((Kind.I, stage, microbatch))
        position[rank] += 1
        if position[rank] == len(programs[rank].actions):
            live.remove(rank)
    assert not any(posted.values()), "a send is never received"
    assert not any(hands), "a message is never used"
    assert {(c.src, c.dst): (c.messages, c.depth) for c in channels} == {
        pair: (count, deepest[pair]) for pair, count in sent.items()
    }
