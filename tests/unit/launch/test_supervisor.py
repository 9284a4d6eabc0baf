"""When a job that has failed is started again, and from where."""

from pathlib import Path

import pytest

from megapipe.errors import TooManyRestarts
from megapipe.launch import progress
from megapipe.launch.progress import Progress, Request
from megapipe.launch.supervisor import LONGEST_S, RestartDecision, Supervisor, line


@pytest.mark.parametrize("code", [1, 4, 9, 128 + 9, 128 + 11, 128 + 6])
def test_faults_of_a_run_that_trains(code: int) -> None:
    assert Supervisor(3).decide(code, Progress(0, 7)) == RestartDecision(1, 1.0, 0)


@pytest.mark.parametrize("code", [0, 2, 3, 5, 6, 7, 8, 75, 130, 128 + 15, 128 + 1])
def test_what_would_fail_again_or_was_wished(code: int) -> None:
    assert Supervisor(3).decide(code, Progress(0, 7)) is None


def test_a_program_that_never_trained_is_left_alone() -> None:
    assert Supervisor(3).decide(137, Progress()) is None
    assert Supervisor(0).decide(137, Progress(0, 7)) is None


def test_an_elastic_job_goes_on_without_a_node_that_was_stopped() -> None:
    supervisor = Supervisor(2, elastic=True)
    for step in (7, 7, 7, 7):
        assert supervisor.decide(75, Progress(0, step)) == RestartDecision(0, 0.0, 0), (
            "that is no fault"
        )
    assert supervisor.decide(75, Progress(0, 8, ends=1)) is None, "a callback has ended it"
    assert supervisor.decide(75, Progress()) is None
    assert supervisor.decide(137, Progress(0, 8)) == RestartDecision(1, 1.0, 0)
    assert Supervisor(2).decide(75, Progress(0, 8)) is None, "it has as many nodes as ever"


def test_a_start_that_fails_before_it_looks_for_a_checkpoint_counts() -> None:
    """A node that takes its time to come back makes a start fail so."""
    supervisor = Supervisor(3)
    assert supervisor.decide(137, Progress(0, 7)) == RestartDecision(1, 1.0, 0)
    assert supervisor.decide(4, Progress()) == RestartDecision(2, 2.0, 0)
    assert supervisor.decide(4, Progress()) == RestartDecision(3, 4.0, 0)
    with pytest.raises(TooManyRestarts, match="3 starts in a row did not get beyond step 7; "):
        supervisor.decide(4, Progress())


def test_a_checkpoint_that_cannot_be_loaded_twice_is_left_for_an_older_one() -> None:
    supervisor = Supervisor(3)
    assert supervisor.decide(137, Progress(0, 5)) == RestartDecision(1, 1.0, 0)
    assert supervisor.decide(139, Progress(4)) == RestartDecision(2, 2.0, 0)
    assert supervisor.decide(139, Progress(4)) == RestartDecision(3, 4.0, 4)
    assert supervisor.decide(137, Progress(2, 9)) == RestartDecision(1, 1.0, 0), "it was that"


@pytest.mark.parametrize("code", [1, 4, 139])
def test_so_is_one_of_an_earlier_job(code: int) -> None:
    """Each older checkpoint is tried twice as well."""
    supervisor = Supervisor(5)
    wanted = [(6, 0), (6, 6), (4, 0), (4, 4), (2, 0)]
    for number, (first, before) in enumerate(wanted, 1):
        again = supervisor.decide(code, Progress(first))
        assert again is not None
        assert (again.number, again.before) == (number, before)
    with pytest.raises(
        TooManyRestarts, match="5 starts in a row completed no step; the last ended"
    ):
        supervisor.decide(code, Progress(2))


def test_a_run_without_a_checkpoint_that_never_trains() -> None:
    """One that is killed may go on; what a program raises, it would raise again."""
    assert Supervisor(3).decide(137, Progress(0)) == RestartDecision(1, 1.0, 0)
    assert Supervisor(3).decide(4, Progress(0)) == RestartDecision(1, 1.0, 0)
    assert Supervisor(3).decide(1, Progress(0)) is None
    assert Supervisor(3).decide(2, Progress(4)) is None


def test_who_comes_further_begins_to_count_anew() -> None:
    supervisor = Supervisor(2)
    for step in range(10, 100, 10):
        assert supervisor.decide(137, Progress(step - 10, step)) == RestartDecision(1, 1.0, 0)
        assert supervisor.decide(137, Progress(step, step)) == RestartDecision(2, 2.0, step)


def test_two_faults_at_a_step_ask_for_an_older_checkpoint() -> None:
    supervisor = Supervisor(9)
    assert supervisor.decide(1, Progress(6, 9)) == RestartDecision(1, 1.0, 0)
    assert supervisor.decide(1, Progress(6, 8)) == RestartDecision(2, 2.0, 0), "another step"
    assert supervisor.decide(1, Progress(6, 8)) == RestartDecision(3, 4.0, 6)
    assert supervisor.decide(4, Progress()) == RestartDecision(4, 8.0, 6), "still"
    assert supervisor.decide(1, Progress(3, 8)) == RestartDecision(5, 16.0, 0), "its first start"
    assert supervisor.decide(1, Progress(3, 8)) == RestartDecision(6, 32.0, 3), "further back"
    assert supervisor.decide(1, Progress(0, 10)) == RestartDecision(1, 1.0, 0), "it was that"


def test_the_start_that_made_a_checkpoint_counts_for_it() -> None:
    supervisor = Supervisor(3)
    assert supervisor.decide(1, Progress(0, 5)) == RestartDecision(1, 1.0, 0)
    assert supervisor.decide(1, Progress(4, 5)) == RestartDecision(2, 2.0, 4)
    supervisor = Supervisor(3)
    assert supervisor.decide(1, Progress(0, 0)) == RestartDecision(1, 1.0, 0)
    assert supervisor.decide(1, Progress(0, 0)) == RestartDecision(2, 2.0, 0), (
        "there is no checkpoint"
    )


def test_waits_have_a_bound() -> None:
    supervisor = Supervisor(20)
    waits = [again.wait_s for _ in range(20) if (again := supervisor.decide(1, Progress(0, 0)))]
    assert waits[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert max(waits) == LONGEST_S


def test_the_line() -> None:
    assert line(RestartDecision(1, 1.0, 0), 3, 7) == "restarting after step 7 (1 of 3), in 1 s"
    text = "restarting after a start without a step (1 of 3), in 1 s"
    assert line(RestartDecision(1, 1.0, 0), 3, -1) == text
    text = "restarting after step 7 (2 of 3), in 2 s, from before step 6"
    assert line(RestartDecision(2, 2.0, 6), 3, 7) == text
    text = "restarting after step 7 with the remaining nodes"
    assert line(RestartDecision(0, 0.0, 0), 3, 7) == text


def test_the_record(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    path.touch()
    assert progress.read(path) == Progress(-1, -1, 0)
    assert progress.read_request(path) == Request(-1, 0)
    records = (Progress(), Progress(3, 2**40), Progress(3, 4, 1))
    requests = (Request(), Request(6), Request(0, 1))
    for record in records:
        progress.write(path, record)
        for request in requests:
            progress.write_request(path, request)
            assert progress.read(path) == record
            assert progress.read_request(path) == request
    path.write_bytes(b"half of it")
    for gone in (path, tmp_path / "gone"):
        assert progress.read(gone) == Progress()
        assert progress.read_request(gone) == Request()
    assert progress.from_environment({}) is None
    environ = {progress.ENVIRONMENT: str(path)}
    assert progress.from_environment(environ) == path
    assert not environ, "jobs that the run starts are none of its launcher's"
