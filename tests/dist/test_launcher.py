"""Our launcher, with programs of one line in the place of train.py."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from megapipe.launch.launcher import main
from tests.parity.jobs import ROOT, Job, Outcome, free_port
from tests.parity.tiers import in_parts

SHOW = (
    "named = [os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')]; "
    "os.write(1, (' '.join(named) + '\\n').encode())"  # at once: others write there too
)


def program(text: str) -> list[str]:
    return ["-c", f"import os, sys, signal, time; rank = int(os.environ['RANK']); {text}"]


def run(folder: Path, text: str, nproc: int = 3) -> Outcome:
    with Job(folder) as job:
        job.start(["-m", "megapipe.launch", f"--nproc={nproc}", *program(text)])
        return job.end()


@pytest.mark.full
def test_the_exit_code_is_that_of_the_first_to_fail(tmp_path: Path) -> None:
    outcome = run(tmp_path, "time.sleep(600 * (rank != 1)); sys.exit(6)")
    assert outcome.codes == [6]
    assert outcome.text == ""


@pytest.mark.full
def test_a_signal_that_comes_when_the_code_is_known_changes_nothing(tmp_path: Path) -> None:
    """The signal may be a scheduler's, which ends all launchers when one has ended."""
    with Job(tmp_path) as job:
        options = ["-m", "megapipe.launch", "--nproc=1", "--verdict", str(tmp_path / "verdict")]
        launcher = job.start([*options, *program("sys.exit(2)")])
        while not (tmp_path / "verdict").exists() and launcher.poll() is None:
            time.sleep(0.001)
        while launcher.poll() is None:
            launcher.terminate()
            time.sleep(0.01)
        outcome = job.end()
    assert outcome.codes == [2]
    assert outcome.text == ""
    assert (tmp_path / "verdict").read_text() == "2\n"


@pytest.mark.full
def test_a_rank_that_was_killed_is_spoken_for(tmp_path: Path) -> None:
    outcome = run(tmp_path, "os.kill(os.getpid(), 9) if rank == 2 else time.sleep(600)")
    assert outcome.codes == [128 + signal.SIGKILL]
    assert outcome.errors == [
        "megapipe: error: rank 2 was killed by SIGKILL; the system does this when memory runs out"
    ]
    assert len(outcome.text.splitlines()) == 1


SKEWED = """
import datetime, time
real = time.time
time.time = lambda: real() + {seconds}
class Skewed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds={seconds})
    @classmethod
    def utcnow(cls):
        return super().utcnow() + datetime.timedelta(seconds={seconds})
datetime.datetime = Skewed
"""


@in_parts("code", [0, 3], full=[0])
def test_nodes_meet_and_hand_on_their_code(code: int, tmp_path: Path) -> None:
    """Their clocks are two minutes apart."""
    nodes = ["--nnodes", "2", "--nproc", "2", "--rdzv-id", "a"]
    nodes += ["--rdzv-endpoint", f"localhost:{free_port()}"]
    with Job(tmp_path) as job:
        for seconds in (-60, 60):
            clock = tmp_path / f"clock{seconds}"
            clock.mkdir()
            (clock / "sitecustomize.py").write_text(SKEWED.format(seconds=seconds))
            command = ["-m", "megapipe.launch", *nodes, *program(f"{SHOW}; sys.exit({code})")]
            job.start(command, {"PYTHONPATH": str(clock)})
        outcome = job.end()
    said = set(outcome.text.splitlines())
    assert said <= {"0 0 4", "1 1 4", "2 0 4", "3 1 4"}
    assert len(said) == 4 or code, "the first to fail may end others before they speak"
    assert outcome.codes == [code, code]


@pytest.mark.slow
def test_the_node_of_the_store_may_end_first(tmp_path: Path) -> None:
    port = free_port()
    nodes = ["--nnodes", "2", "--rdzv-id", "a", "--rdzv-endpoint", f"localhost:{port}"]
    text = "time.sleep(float(os.environ['TEST_LEAVES'])); print('left'); sys.exit(6)"
    with Job(tmp_path) as job:
        for leaves in ("0.5", "2"):
            command = ["-m", "megapipe.launch", *nodes, *program(text)]
            job.start(command, {"TEST_LEAVES": leaves})
            job.await_store(port)
        outcome = job.end()
    assert outcome.text == "left\n" * 2
    assert outcome.codes == [6, 6]


LATE = """
import os, sys, time
sys.path.insert(0, {root!r})
time.sleep(float(os.environ["TEST_LATE_S"]))
from megapipe.train.main import main
main(sys.argv[1:])
"""


@pytest.mark.full
def test_a_mistake_is_told_once_where_one_node_is_late(tmp_path: Path) -> None:
    """The launcher whose ranks find it first has the store."""
    script, port = tmp_path / "late.py", free_port()
    script.write_text(LATE.format(root=str(ROOT)))
    nodes = ["--nnodes", "2", "--nproc", "2", "--rdzv-id", "a"]
    nodes += ["--rdzv-endpoint", f"localhost:{port}", str(script), "train.stepps=1"]
    with Job(tmp_path) as job:
        for late_s in (0, 4):
            job.start(["-m", "megapipe.launch", *nodes], {"TEST_LATE_S": str(late_s)})
            job.await_store(port)
        job.end().assert_one_line(2, "train.stepps")


@pytest.mark.full
def test_nodes_that_do_not_meet(tmp_path: Path) -> None:
    """Nobody is at the address, which is not of this machine."""
    nodes = ["--nnodes", "2", "--rdzv-id", "a", "--rdzv-endpoint", "no-such-host.invalid:1"]
    nodes += ["--rdzv-timeout", "2"]
    with Job(tmp_path) as job:
        job.start(["-m", "megapipe.launch", *nodes, *program("pass")])
        job.end().assert_one_line(4, "no-such-host.invalid:1", "the rendezvous failed")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no program"),
        (["--nproc", "0", "train.py"], "expected a number >= 1"),
        (["--nproc", "many", "train.py"], "invalid int value: 'many'"),
        (["--nodes", "2", "train.py"], "--nodes"),
        (["--nnodes", "2", "train.py"], "--rdzv-endpoint HOST:PORT and --rdzv-id"),
    ],
)
def test_arguments_that_make_no_sense(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
