"""A rank that is killed or stopped before the first step: nobody waits for it in vain, and it is
named."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.parity.jobs import OUR_FRAME, Job
from tests.parity.stuck_setup import TwoNodes
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full
TIMEOUT_S = 6.0
LEAVE_S = 5.0
"""Seconds after ``parallel.timeout_s`` within which all have ended for a rank that is stopped."""
SOON_S = 12.0
"""Seconds within which all have ended for a rank that is killed, whatever the time-out."""
TORCHRUN_S = 3.0
"""Seconds that torchrun may take to end when its ranks have."""
LONG = {"parallel.pp": "2", "parallel.timeout_s": "300"}
SHORT = {"parallel.pp": "2", "parallel.timeout_s": str(TIMEOUT_S)}


def each(*places: str, full: Sequence[tuple[str, int]] = ()) -> Any:
    """Combine each place with each rank; all cases are slow ones but those of `full`."""
    return in_parts(("place", "rank"), [(p, rank) for p in places for rank in (0, 1)], full=full)


def strike(job: Job, rank: int, number: signal.Signals) -> float:
    """Send a signal to a rank; return when."""
    os.kill(job.pids()[rank], number)
    return time.monotonic()


def assert_ended(job: Job, seconds: float, *codes: int | None) -> None:
    """Check that the processes end by these codes within `seconds`; None: it is not waited for."""
    until = time.monotonic() + seconds
    found = [
        None if code is None else process.wait(max(0.1, until - time.monotonic()))
        for process, code in zip(job.processes, codes, strict=True)
    ]
    assert found == [*codes], job.text


def the_line(job: Job) -> str:
    """Return the only error line. There is no traceback of ours; torchrun has some of its own."""
    assert not OUR_FRAME.search(job.text), job.text
    assert 'stays.py", line' not in job.text, job.text
    (line,) = [line for line in job.text.splitlines() if line.startswith("megapipe: error:")]
    return line


def assert_named(rank: int, line: str) -> None:
    """Check that the rank is named by the monitor, by those who wait for it in the store, or as the
    one that has the store, whoever is first."""
    ways = r"the job hangs: rank (\d+) \(|arrived within 6 s .*, and not rank (\d+):"
    found = re.search(rf"{ways}|the rendezvous store at \S+ \(rank (\d+)'s\): no answer", line)
    assert found is not None, line
    assert str(rank) in found.groups()


@each("corpus", "tokenizer")
def test_a_killed_rank_of_two_nodes(tmp_path: Path, place: str, rank: int) -> None:
    """Without a launcher. Rank 0 takes the store with it."""
    with Job(tmp_path) as job:
        TwoNodes(job, place, rank, **LONG).by_hand()
        strike(job, rank, signal.SIGKILL)
        assert_ended(job, SOON_S, *(-9 if other == rank else 4 for other in range(2)))
        line = the_line(job)
        job.end()
    named = f"lost contact with rank {rank} (" in line
    assert named or (rank == 0 and "(rank 0's)" in line)


@each("corpus", "tokenizer")
def test_a_stopped_rank_of_two_nodes(tmp_path: Path, place: str, rank: int) -> None:
    with Job(tmp_path) as job:
        TwoNodes(job, place, rank, **SHORT).by_hand()
        strike(job, rank, signal.SIGSTOP)
        codes = [None if other == rank else 4 for other in range(2)]
        assert_ended(job, TIMEOUT_S + LEAVE_S, *codes)
        assert_named(rank, the_line(job))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes(tmp_path: Path, rank: int) -> None:
    """Without a launcher nobody knows whether it was killed or is late."""
    with Job(tmp_path) as job:
        TwoNodes(job, "import", rank, **SHORT).by_hand()
        strike(job, rank, signal.SIGKILL)
        assert_ended(job, TIMEOUT_S + LEAVE_S, *(-9 if other == rank else 4 for other in range(2)))
        line = the_line(job)
        job.end()
    assert f"rank {rank}" in line
    assert re.search("look at (the|their) output", line)


@pytest.mark.deadline
@each("corpus", "import", full=[("corpus", 0)])
def test_a_killed_rank_of_two_launchers(tmp_path: Path, place: str, rank: int) -> None:
    with Job(tmp_path) as job:
        TwoNodes(job, place, rank, **LONG).launched()
        strike(job, rank, signal.SIGKILL)
        assert_ended(job, SOON_S, 137, 137)
        line = the_line(job)
        job.end()
    assert f"rank {rank} was killed by SIGKILL" in line


@each("corpus", "tokenizer", "import")
def test_a_stopped_rank_of_two_launchers(tmp_path: Path, place: str, rank: int) -> None:
    with Job(tmp_path) as job:
        TwoNodes(job, place, rank, **SHORT).launched()
        strike(job, rank, signal.SIGSTOP)
        assert_ended(job, TIMEOUT_S + LEAVE_S, 4, 4)
        assert_named(rank, the_line(job))
        job.end()


@pytest.mark.slow
def test_a_stopped_rank_that_waits_for_the_corpus(tmp_path: Path) -> None:
    """The one that works is not to blame, and nobody waits until it has done its work; the watchdog
    of training may be off."""
    wanted = {**SHORT, "parallel.tp": "2", "parallel.watchdog": "false"}
    with Job(tmp_path) as job:
        TwoNodes(job, "corpus", 0, **wanted).launched(2)
        time.sleep(TIMEOUT_S + 2.0)
        assert all(process.poll() is None for process in job.processes), job.text
        strike(job, 3, signal.SIGSTOP)
        assert_ended(job, TIMEOUT_S + LEAVE_S, 4, 4)
        line = the_line(job)
        job.end()
    assert "the job hangs: rank 3 (pp 1, dp 0, cp 0, tp 1; process " in line
    assert "is stopped by a signal, for 6 s at preparing the data" in line


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_under_torchrun(tmp_path: Path, rank: int) -> None:
    """On two nodes; torchrun has a code of its own for what has failed."""
    with Job(tmp_path) as job:
        TwoNodes(job, "corpus", rank, **SHORT).torchrun()
        strike(job, rank, signal.SIGSTOP)
        assert_ended(job, TIMEOUT_S + LEAVE_S + TORCHRUN_S, 1, 1)
        assert_named(rank, the_line(job))
        job.end()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_under_torchrun(tmp_path: Path, rank: int) -> None:
    """torchrun names it, and may end other nodes before a monitor does."""
    with Job(tmp_path) as job:
        TwoNodes(job, "corpus", rank, **LONG).torchrun()
        strike(job, rank, signal.SIGKILL)
        assert_ended(job, SOON_S + TORCHRUN_S, 1, 1)
        job.end()
        assert re.search(rf"rank +: {rank} .*\n +exitcode +: -9 ", job.text), job.text
