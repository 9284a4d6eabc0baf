"""What a launcher does with its ranks when some have ended, here or on another node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megapipe.launch import launcher
from megapipe.launch.agent import Agent
from megapipe.launch.rank_reaper import LOOK_S, RankReaper


@pytest.mark.parametrize("failed", [True, False])
def test_a_stopped_rank_is_killed_when_the_job_has_failed(failed: bool) -> None:
    """Elsewhere: no other rank is here."""
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        rank.send_signal(signal.SIGSTOP)
        ends = RankReaper(lambda: [rank.pid], lambda: failed, lambda: False, lambda code: None)
        ends.start()
        if failed:
            assert rank.wait(10) == -signal.SIGKILL
            assert ends.killed == {rank.pid}
        else:
            time.sleep(4 * LOOK_S)
            assert rank.poll() is None
        ends.over.set()
    finally:
        rank.kill()
        rank.wait()


@pytest.mark.parametrize("noticed", [True, False])
def test_an_agent_that_has_noticed_the_end_of_the_ranks_may_take_its_time(noticed: bool) -> None:
    """It may start the job again; one that has not waits for a store that does not answer."""
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(4)"]) as rank:
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked for its code
        late: list[int] = []
        ends = RankReaper(lambda: [rank.pid], lambda: False, lambda: noticed, late.append)
        ends.run()
    assert late == ([] if noticed else [4])


def ended(code: int) -> Any:
    """Return what torchrun's agent reports of a job whose rank 3 has ended with `code`."""
    return SimpleNamespace(failures={3: SimpleNamespace(exitcode=code, pid=7)})


def test_the_exit_code_of_a_rank_that_was_killed(capsys: pytest.CaptureFixture[str]) -> None:
    """It is news unless another process has failed before; one that the launcher itself has killed
    is lost."""
    relay: Any = SimpleNamespace(killed_for=None, handed_on=set())
    killed = ended(-signal.SIGKILL)
    assert launcher._exit_code(killed, relay, stopped=set(), before=4) == 4
    assert capsys.readouterr().err == ""
    assert launcher._exit_code(killed, relay, stopped=set(), before=None) == 137
    assert "rank 3 was killed by SIGKILL" in capsys.readouterr().err
    assert launcher._exit_code(killed, relay, stopped={7}, before=None) == 4
    said = capsys.readouterr().err
    assert said == (
        "megapipe: error: rank 3 is stopped by a signal, and the job ended without it\n"
    )


def test_a_launcher_that_is_ended_as_another_has_failed_adds_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A scheduler ends it, and its ranks have not begun to hear signals."""
    relay: Any = SimpleNamespace(killed_for=None, handed_on={signal.SIGTERM})
    asked = ended(-signal.SIGTERM)
    assert launcher._exit_code(asked, relay, stopped=set(), before=2) == 2
    assert capsys.readouterr().err == ""
    assert launcher._exit_code(asked, relay, stopped=set(), before=None) == 75
    assert "stopped by SIGTERM before the ranks started" in capsys.readouterr().err
    agent: Any = SimpleNamespace(_handed_on=relay.handed_on, _failure_codes=[2], before=None)
    Agent._claim(agent, 128 + signal.SIGTERM, worker_group=Any)  # type: ignore[arg-type]
    assert agent.before == 2
