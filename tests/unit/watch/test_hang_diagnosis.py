"""Which rank causes a hang, by what ranks have noted."""

from __future__ import annotations

from megapipe.watch.hang_diagnosis import (
    BEATLESS_S,
    GONE_S,
    HangDiagnosis,
    RankView,
    describe,
    diagnose,
)
from megapipe.watch.journal import JournalState

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
    unheard: bool = False,
    step: int = 3,
) -> RankView:
    given = {} if line is None else {line: exchange}
    state = JournalState(
        7, 9, step, "F stage 0", "pp 0", {**given, **(begun or {})}, line, exchange, heeds, False
    )
    return RankView(state, still_s, beatless_s, stopped, "node1", gone, unheard)


def test_nobody_who_waits_is_no_hang() -> None:
    assert diagnose({}, LIMIT_S) is None
    assert diagnose({0: view(), 1: view(stopped=True)}, LIMIT_S) is None, "nobody misses them"
    waits = view(CHANNEL, 1, (0, 1), still_s=LIMIT_S - 0.1)
    assert diagnose({0: waits, 1: view(stopped=True)}, LIMIT_S) is None, "not yet"
    all_suspended = {0: view(CHANNEL, 1, (0, 1), stopped=True), 1: view(stopped=True)}
    assert diagnose(all_suspended, LIMIT_S) is None


def test_a_stopped_rank_behind_two_that_wait() -> None:
    """0 waits for 1, which waits for 2."""
    views = {
        0: view("a", 4, (0, 1), begun={"a": 4}),
        1: view("b", 2, (1, 2), begun={"a": 3}),
        2: view(stopped=True, begun={"b": 1}),
        3: view(still_s=0.0),
    }
    assert diagnose(views, LIMIT_S) == HangDiagnosis(2, "stopped", LIMIT_S, (0, 1))


def test_who_holds_the_lock_does_not_count_as_waiting() -> None:
    """The holder's message may have come, and the holder cannot go on."""
    views = {
        0: view("a", 4, (0, 1)),
        1: view("b", 2, (0, 1), begun={"a": 3}, beatless_s=BEATLESS_S),
    }
    views[0].state.begun["b"] = 2
    assert diagnose(views, LIMIT_S) == HangDiagnosis(1, "holds the lock", LIMIT_S, (0,))


def test_a_busy_rank() -> None:
    views = {0: view(GROUP, 4, (0, 1, 2)), 1: view(GROUP, 4, (0, 1, 2)), 2: view(begun={GROUP: 3})}
    assert diagnose(views, LIMIT_S) == HangDiagnosis(2, "busy", LIMIT_S, (0, 1))


def test_a_message_that_was_lost() -> None:
    """1 has sent the fourth message and waits for the answer, which 0 cannot give."""
    views = {
        0: view("0<1", 4, (0, 1), begun={"0>1": 3}),
        1: view("0>1", 4, (0, 1), begun={"0<1": 4}),
    }
    assert diagnose(views, LIMIT_S) == HangDiagnosis(1, "sent nothing", LIMIT_S, (0,))
    views[1] = view(begun={"0<1": 4}, stopped=True)
    assert diagnose(views, LIMIT_S) == HangDiagnosis(1, "stopped", LIMIT_S, (0,)), (
        "before it had left"
    )


def test_an_exchange_that_all_have_begun() -> None:
    views = {rank: view(GROUP, 4, (0, 1, 2)) for rank in range(3)}
    found = diagnose(views, LIMIT_S)
    assert found is not None
    assert found.why == "unclear"
    assert "a collective that all its ranks have started" in describe(found, views, LIMIT_S)


def test_a_rank_of_which_nothing_is_known() -> None:
    views = {0: view(CHANNEL, 4, (0, 9))}
    found = diagnose(views, LIMIT_S)
    assert found == HangDiagnosis(9, "unknown", 0.0, (0,))
    assert describe(found, views, LIMIT_S) == (
        "the job hangs: rank 0 waits for rank 9, whose state is unknown, for 10 s "
        "(parallel.timeout_s)"
    )


def test_a_rank_that_is_gone() -> None:
    """Nobody waits for it until the limit, whatever else there is to see."""
    waits = view("a", 4, (0, 1), still_s=GONE_S)
    gone = view("b", 2, (1, 2), begun={"a": 3}, still_s=GONE_S, beatless_s=GONE_S, gone=True)
    stopped = view(stopped=True, begun={"b": 1}, still_s=GONE_S)
    views = {0: waits, 1: gone, 2: stopped}
    found = diagnose(views, LIMIT_S)
    assert found == HangDiagnosis(1, "gone", GONE_S, (0,))
    assert describe(found, views, LIMIT_S) == (
        "rank 0 lost contact with rank 1 (pp 0; process 7 on node1), whose process ended "
        "without an error message at step 3: F stage 0"
    )
    views[0] = waits._replace(still_s=GONE_S - 0.1)
    assert diagnose(views, LIMIT_S) is None, "it may hear of it by itself"
    views = {0: waits, 1: gone._replace(gone=False, stopped=True), 2: stopped}
    assert diagnose(views, LIMIT_S) is None, "who is there may go on"


def test_a_rank_that_is_gone_when_another_has_lost_contact() -> None:
    """It is named at once, whether or not somebody is known to wait for it."""
    lost = view("a", 4, (0, 1, 2), still_s=0.0)
    lost = lost._replace(state=lost.state._replace(lost_contact=True))
    gone = view(still_s=0.5, beatless_s=0.5, gone=True)
    assert diagnose({0: lost, 1: view(), 2: gone}, LIMIT_S) == HangDiagnosis(2, "gone", 0.5, (0,))
    assert diagnose({0: lost, 1: view(), 2: gone._replace(gone=False)}, LIMIT_S) is None
    silent = gone._replace(gone=False, stopped=True)
    assert diagnose({0: lost, 1: view(), 2: silent}, LIMIT_S) is None, (
        "a connection to it stays open"
    )


def test_a_rank_whose_node_is_not_heard() -> None:
    """It is to blame rather than one that waits for it on yet another node."""
    views = {
        0: view(GROUP, 4, (0, 1, 2)),
        1: view(begun={GROUP: 3}),
        2: view(begun={GROUP: 3}, unheard=True),
    }
    found = diagnose(views, LIMIT_S)
    assert found == HangDiagnosis(2, "unheard", LIMIT_S, (0,))
    assert describe(found, views, LIMIT_S) == (
        "the job hangs: rank 2 (pp 0; process 7 on node1) is on a node that sends nothing any "
        "more, for 10 s at step 3: F stage 0; rank 0 waits for it (parallel.timeout_s=10)"
    )


def test_before_the_first_step_a_rank_may_work_for_as_long_as_it_likes() -> None:
    hours = 20 * 3600.0
    works = view(step=0, still_s=hours)
    others = {0: view(step=0, still_s=hours), 2: view(step=0, still_s=hours)}
    assert diagnose({**others, 1: works}, LIMIT_S) is None
    locks = works._replace(beatless_s=hours)
    assert diagnose({**others, 1: locks}, LIMIT_S) is None, "its code does not let its heart beat"


def test_a_rank_that_is_lost_before_the_first_step() -> None:
    """Nobody is noted to wait for it."""
    works, hours = view(step=0, still_s=3600.0), 3600.0
    for lost, limit_s in (("gone", GONE_S), ("stopped", LIMIT_S), ("unheard", LIMIT_S)):
        silent = view(step=0, still_s=hours, beatless_s=limit_s)._replace(**{lost: True})
        assert diagnose({0: works, 1: silent}, LIMIT_S) == HangDiagnosis(1, lost, limit_s, ())  # type: ignore[arg-type]
        earlier = silent._replace(beatless_s=limit_s - 0.1)
        assert diagnose({0: works, 1: earlier}, LIMIT_S) is None
        assert diagnose({0: silent, 1: silent}, LIMIT_S) is None, "nobody is left"
    found = HangDiagnosis(1, "gone", GONE_S, ())
    assert describe(found, {1: works}, LIMIT_S) == (
        "the job lost contact with rank 1 (pp 0; process 7 on node1), whose process ended "
        "without an error message at F stage 0"
    )
    found = HangDiagnosis(1, "stopped", LIMIT_S, ())
    assert describe(found, {1: works}, LIMIT_S) == (
        "the job hangs: rank 1 (pp 0; process 7 on node1) is stopped by a signal, for 10 s at "
        "F stage 0; the job waits for it (parallel.timeout_s=10)"
    )


def test_the_line_for_the_user() -> None:
    views = {0: view("a", 4, (0, 1)), 2: view("a", 4, (1, 2)), 1: view(stopped=True)}
    found = diagnose(views, LIMIT_S)
    assert found is not None
    assert describe(found, views, LIMIT_S) == (
        "the job hangs: rank 1 (pp 0; process 7 on node1) is stopped by a signal, for 10 s at step "
        "3: F stage 0; ranks 0, 2 wait for it (parallel.timeout_s=10)"
    )
