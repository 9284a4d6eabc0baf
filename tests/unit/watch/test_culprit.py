"""Who is to blame, by what ranks have noted."""

from __future__ import annotations

from megapipe.watch.culprit import BEATLESS_S, GONE_S, Culprit, View, find, told
from megapipe.watch.journal import State

LIMIT_S = 10.0
CHANNEL, GROUP = "channel", "group"


def view(
    line: str | None = None,
    exchange: int = 0,
    heeds: tuple[int, ...] = (),
    *,
    begun: dict[str, int] | None = None,
    still_s: float = LIMIT_S,
    beatless_s: float = 0.1,
    stopped: bool = False,
    gone: bool = False,
) -> View:
    given = {} if line is None else {line: exchange}
    state = State(
        7, 9, 3, "F stage 0", "pp 0", {**given, **(begun or {})}, line, exchange, heeds, False
    )
    return View(state, still_s, beatless_s, stopped, "node1", gone)


def test_nobody_who_waits_is_no_hang() -> None:
    assert find({}, LIMIT_S) is None
    assert find({0: view(), 1: view(stopped=True)}, LIMIT_S) is None, "nobody misses them"
    waits = view(CHANNEL, 1, (0, 1), still_s=LIMIT_S - 0.1)
    assert find({0: waits, 1: view(stopped=True)}, LIMIT_S) is None, "not yet"
    all_suspended = {0: view(CHANNEL, 1, (0, 1), stopped=True), 1: view(stopped=True)}
    assert find(all_suspended, LIMIT_S) is None


def test_a_stopped_rank_behind_two_that_wait() -> None:
    """0 waits for 1, which waits for 2."""
    views = {
        0: view("a", 4, (0, 1), begun={"a": 4}),
        1: view("b", 2, (1, 2), begun={"a": 3}),
        2: view(stopped=True, begun={"b": 1}),
        3: view(still_s=0.0),
    }
    assert find(views, LIMIT_S) == Culprit(2, "stopped", LIMIT_S, (0, 1))


def test_who_holds_the_lock_does_not_count_as_waiting() -> None:
    """Its own message may have come, and it cannot go on."""
    views = {
        0: view("a", 4, (0, 1)),
        1: view("b", 2, (0, 1), begun={"a": 3}, beatless_s=BEATLESS_S),
    }
    views[0].state.begun["b"] = 2
    assert find(views, LIMIT_S) == Culprit(1, "holds the lock", LIMIT_S, (0,))


def test_a_busy_rank() -> None:
    views = {0: view(GROUP, 4, (0, 1, 2)), 1: view(GROUP, 4, (0, 1, 2)), 2: view(begun={GROUP: 3})}
    assert find(views, LIMIT_S) == Culprit(2, "busy", LIMIT_S, (0, 1))


def test_a_message_that_was_lost() -> None:
    """1 has sent the fourth message and waits for the answer, which 0 cannot give."""
    views = {
        0: view("0<1", 4, (0, 1), begun={"0>1": 3}),
        1: view("0>1", 4, (0, 1), begun={"0<1": 4}),
    }
    assert find(views, LIMIT_S) == Culprit(1, "sent nothing", LIMIT_S, (0,))
    views[1] = view(begun={"0<1": 4}, stopped=True)
    assert find(views, LIMIT_S) == Culprit(1, "stopped", LIMIT_S, (0,)), "before it had left"


def test_an_exchange_that_all_have_begun() -> None:
    views = {rank: view(GROUP, 4, (0, 1, 2)) for rank in range(3)}
    found = find(views, LIMIT_S)
    assert found is not None
    assert found.why == "unclear"
    assert "an exchange that all its members have begun" in told(found, views, LIMIT_S)


def test_a_rank_of_which_nothing_is_known() -> None:
    views = {0: view(CHANNEL, 4, (0, 9))}
    found = find(views, LIMIT_S)
    assert found == Culprit(9, "unknown", 0.0, (0,))
    assert told(found, views, LIMIT_S) == (
        "the job hangs: rank 0 waits for rank 9, of which nothing is known, for 10 s "
        "(parallel.timeout_s)"
    )


def test_a_rank_that_is_gone() -> None:
    """Nobody waits for it until the limit, whatever else there is to see."""
    waits = view("a", 4, (0, 1), still_s=GONE_S)
    gone = view("b", 2, (1, 2), begun={"a": 3}, still_s=GONE_S, beatless_s=GONE_S, gone=True)
    stopped = view(stopped=True, begun={"b": 1}, still_s=GONE_S)
    views = {0: waits, 1: gone, 2: stopped}
    found = find(views, LIMIT_S)
    assert found == Culprit(1, "gone", GONE_S, (0,))
    assert told(found, views, LIMIT_S) == (
        "rank 0 lost contact with rank 1 (pp 0; process 7 on node1), whose process has ended "
        "without a word, for 5 s at step 3: F stage 0"
    )
    views[0] = waits._replace(still_s=GONE_S - 0.1)
    assert find(views, LIMIT_S) is None, "it may hear of it by itself"
    views = {0: waits, 1: gone._replace(gone=False, stopped=True), 2: stopped}
    assert find(views, LIMIT_S) is None, "who is there may go on"


def test_the_line_for_the_user() -> None:
    views = {0: view("a", 4, (0, 1)), 2: view("a", 4, (1, 2)), 1: view(stopped=True)}
    found = find(views, LIMIT_S)
    assert found is not None
    assert told(found, views, LIMIT_S) == (
        "the job hangs: rank 1 (pp 0; process 7 on node1) is stopped by a signal, for 10 s at step "
        "3: F stage 0; ranks 0, 2 wait for it (parallel.timeout_s=10)"
    )
