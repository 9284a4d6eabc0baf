"""Ctrl-C and what schedulers send, to real processes: the first saves, the second ends at once."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

from megapipe.checkpoint import Checkpoint
from megapipe.launch.signals import REPEAT_S
from tests.parity.jobs import (
    ENDLESS,
    ROOT,
    Job,
    Outcome,
    arguments,
    free_port,
    run_plain,
    tiny,
)
from tests.parity.launches import run_forked
from tests.parity.tiers import in_parts
from tests.unit.data.data_cases import train_bpe

pytestmark = pytest.mark.full


def heed_interrupts() -> None:
    """Heed SIGINT as from a keyboard; what a shell starts in the background ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


PATIENT = {"parallel.timeout_s": "600"}
"""Settings of ranks that would wait for each other for longer than a test may take."""


def endless(folder: Path, **more: str) -> list[str]:
    return arguments({**tiny(folder), **ENDLESS, **more})


def assert_saved(outcome: Outcome, folder: Path) -> None:
    """Check that one line says so, and that the checkpoint is there."""
    assert len(outcome.errors) == 1, outcome.text
    assert "stopped by a signal; saved step" in outcome.errors[0]
    assert list((folder / "runs/run/checkpoints").glob("step-*/manifest.json")), outcome.text


def test_a_process_that_is_interrupted_saves_and_goes_on_later(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.start(["train.py", *endless(tmp_path)], preexec_fn=heed_interrupts)
        job.await_text("| loss")
        job.processes[0].send_signal(signal.SIGINT)
        outcome = job.end()
    assert outcome.codes == [75]
    assert_saved(outcome, tmp_path)
    assert outcome.errors[0].startswith("megapipe: stopped by a signal"), "it is no error"
    _, command = outcome.errors[0].split("; to continue: ")
    assert shlex.split(command)[1:-1] == shlex.split(
        "-m megapipe launch --nproc 1 -m megapipe train"
    )
    assert command.endswith("runs/run/config.yaml")
    assert outcome.text.count("Ctrl-C again, more than 1 s after this one, stops at once") == 1
    assert "Traceback" not in outcome.text
    saved = int(outcome.errors[0].split("saved step ")[1].split()[0])
    again = run_plain(tmp_path, *endless(tmp_path), f"train.stop_after={saved + 1}")
    assert again.codes == [0]
    assert f"at step {saved} of" in again.text


def test_on_two_nodes_it_says_what_to_start_on_each(tmp_path: Path) -> None:
    """Launchers on one machine stand for nodes; which launcher started the job is not known."""
    endpoint = ["--rdzv-id", "a", "--rdzv-endpoint", f"localhost:{free_port()}"]
    launch = ["-m", "megapipe.launch", "--nnodes", "2", "--nproc", "1", *endpoint]
    with Job(tmp_path) as job:
        for _ in range(2):
            job.start([*launch, "train.py", *endless(tmp_path, **{"parallel.dp": "2"})])
        job.await_text("| loss")
        job.processes[1].send_signal(signal.SIGINT)
        outcome = job.end()
    assert outcome.codes == [75, 75]
    assert_saved(outcome, tmp_path)
    _, command = outcome.errors[0].split("; to go on, start on each node as before: ")
    assert re.fullmatch(r"-m megapipe train \S*runs/run/config.yaml", command)


def test_a_second_interrupt_ends_a_process_that_waits_for_a_peer(tmp_path: Path) -> None:
    """It is inside a collective, where no handler of Python's runs."""
    given = endless(tmp_path, **{"parallel.pp": "2"})
    with Job(tmp_path) as job:
        job.ranks(2, {0: given, 1: given})
        job.await_text("| loss")
        job.processes[1].send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        for _ in range(2):  # from the terminal, and handed on by a launcher
            job.processes[0].send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert job.processes[0].poll() is None
        job.processes[0].send_signal(signal.SIGUSR1)  # asks, and never ends
        time.sleep(REPEAT_S)
        job.processes[0].send_signal(signal.SIGINT)
        assert job.processes[0].wait(15) == 130


INTERRUPTS = """
import os, sys
sys.path.insert(0, {root!r})
from megapipe.train.main import main
from megapipe import TrainStep
def interrupted(*_, **__):
    raise KeyboardInterrupt
if os.environ["RANK"] == "1":
    TrainStep.train = interrupted
main(sys.argv[1:])
"""


def test_an_interrupt_in_code_of_one_rank_ends_all(tmp_path: Path) -> None:
    script = tmp_path / "interrupts.py"
    script.write_text(INTERRUPTS.format(root=str(ROOT)))
    given = endless(tmp_path, **PATIENT, **{"parallel.pp": "2"})
    outcome = run_forked(tmp_path, 2, *given, script=str(script))
    outcome.assert_one_line(130, "rank 1 was interrupted (KeyboardInterrupt)")


@in_parts("rank", [0, 1], full=[0])
def test_an_interrupt_of_one_rank_ends_those_that_meet(rank: int, tmp_path: Path) -> None:
    """At once: the others do not wait for it, nor for the third, which never comes."""
    given = endless(tmp_path, **PATIENT, **{"train.global_batch": "6"})
    with Job(tmp_path) as job:
        job.ranks(3, {0: given, 1: given}, port := free_port())
        job.await_members(port, 2)
        job.processes[rank].send_signal(signal.SIGINT)
        assert job.processes[rank].wait(3) == 130
        outcome = job.end()
    outcome.assert_one_line(130, f"rank {rank} was interrupted (SIGINT)")


def test_an_interrupt_under_torchrun_saves_all(tmp_path: Path) -> None:
    """torchrun's agent hands the signal on to its ranks and gives them half a minute."""
    with Job(tmp_path) as job:
        job.torchrun(2, *endless(tmp_path, **{"parallel.pp": "2"}))
        job.await_text("| loss")
        job.processes[0].send_signal(signal.SIGINT)
        outcome = job.end()
    assert_saved(outcome, tmp_path)


@in_parts(
    ("to", "number"),
    [("launcher", signal.SIGINT), ("rank", signal.SIGTERM)],
    full=[("launcher", signal.SIGINT)],
    ids=str,
)
def test_a_signal_under_our_launcher_saves_all(
    to: str, number: signal.Signals, tmp_path: Path
) -> None:
    """With the command that goes on, under a launcher with the same options."""
    options = ["--nproc=2", "--max-restarts", "3", "--rdzv-timeout", "50"]
    with Job(tmp_path) as job:
        given = endless(tmp_path, **{"parallel.pp": "2"})
        job.start(["-m", "megapipe.launch", *options, "train.py", *given])
        job.await_text("| loss")
        os.kill(job.processes[0].pid if to == "launcher" else job.pids()[1], number)
        outcome = job.end()
    assert_saved(outcome, tmp_path)
    assert outcome.codes == [75]
    _, command = outcome.errors[0].split("; to continue: ")
    launched = ["-m", "megapipe", "launch", *options, "-m", "megapipe", "train"]
    assert shlex.split(command)[1:-1] == launched
    _, _, after = outcome.text.partition(outcome.errors[0] + "\n")
    assert not after or (" saved " in after and after.count("\n") == 1), "by rank 0, a moment later"


@in_parts("stopped", [(1,), (0, 1)], full=[(0, 1)], ids=str)
def test_a_second_interrupt_of_our_launcher_ends_at_once(
    stopped: tuple[int, ...], tmp_path: Path
) -> None:
    """Here where one rank heeds no signal and the other waits for it, or none does."""
    with Job(tmp_path) as job:
        job.launch(2, *endless(tmp_path, **{"parallel.pp": "2"}))
        job.await_text("| loss")
        pids = job.pids()
        for rank in stopped:
            os.kill(pids[rank], signal.SIGSTOP)
        for _ in range(2):
            time.sleep(REPEAT_S + 0.2)
            assert job.processes[0].poll() is None
            job.processes[0].send_signal(signal.SIGINT)
        assert job.processes[0].wait(10) == 130
        outcome = job.end()
    lines = [] if 0 in stopped else ["megapipe: rank 0 was interrupted (SIGINT)"]
    assert outcome.errors == lines


@in_parts(
    ("number", "seconds"),
    [(signal.SIGTERM, 0.0), (signal.SIGUSR1, 2.5)],
    full=[(signal.SIGTERM, 0.0)],
)
def test_a_scheduler_stops_all_ranks_before_the_first_step(
    number: signal.Signals, seconds: float, tmp_path: Path
) -> None:
    """While they are imported, load torch, and meet."""
    given = endless(tmp_path, **PATIENT)
    with Job(tmp_path) as job:
        job.ranks(2, {0: given, 1: given})
        job.await_handlers()
        job.processes[0].send_signal(signal.SIGSTOP)  # nobody trains without it
        time.sleep(seconds)
        for process in job.processes:
            process.send_signal(number)
        job.processes[0].send_signal(signal.SIGCONT)
        outcome = job.end()
    outcome.assert_one_line(75, f"stopped by {number.name} before the first step")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_scheduler_stops_one_rank_while_the_others_meet(rank: int, tmp_path: Path) -> None:
    given = endless(tmp_path, **PATIENT, **{"train.global_batch": "6"})
    with Job(tmp_path) as job:
        job.ranks(3, {0: given, 1: given}, port := free_port())  # the third never comes
        job.await_members(port, 2)
        job.processes[rank].send_signal(signal.SIGTERM)
        outcome = job.end()
    outcome.assert_one_line(75, "stopped by SIGTERM before the first step")


SLOW_DISK = """
import sys, time
sys.path.insert(0, {root!r})
from megapipe.checkpoint import writer
from megapipe.train.main import main
write_shard = writer.write_shard
def throttled(*args, **given):
    time.sleep(3)
    return write_shard(*args, **given)
writer.write_shard = throttled
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("background", ["false", "true"])
def test_a_save_that_would_outlast_the_grace_is_not_begun(background: str, tmp_path: Path) -> None:
    """Only one rank hears the signal; the next start goes on from the checkpoint before."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW_DISK.format(root=str(ROOT)))
    more = {"checkpoint.every": "10", "checkpoint.async_save": background, "parallel.pp": "2"}
    given = endless(tmp_path, **more)
    with Job(tmp_path) as job:
        launch = ["-m", "megapipe.launch", "--nproc", "2", str(script)]
        job.start([*launch, *given, "checkpoint.grace_s=1"])
        job.await_text("saved ")
        os.kill(job.pids()[1], signal.SIGTERM)
        outcome = job.end()
    assert outcome.codes == [75], outcome.text
    (line,) = outcome.errors
    assert re.search(
        r"stopped by a signal; step \d+ of 1000000 is not saved: the last save took [3-9]\S* s, "
        r"and 0\S* s are left of checkpoint.grace_s=1; to continue: .* -m megapipe train \S+$",
        line,
    )
    stopped = int(line.split("; step ")[1].split()[0])
    with Job(tmp_path) as job:  # and where there is time it is saved
        job.start([*launch, *given, "checkpoint.grace_s=60"])
        job.await_text("resumed from ")
        saved = int(job.text.partition(" at step ")[2].split()[0])
        assert 10 <= saved <= stopped
        assert saved % 10 == 0
        job.await_text("saved ")
        os.kill(job.pids()[1], signal.SIGTERM)
        outcome = job.end()
    assert outcome.codes == [75]
    assert_saved(outcome, tmp_path)


SIGNALS = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from megapipe.checkpoint import writer
from megapipe.launch.signals import REPEAT_S
from megapipe.train.main import main
write_shard = writer.write_shard
left = [signal.SIGTERM, signal.SIGUSR1] if os.environ["RANK"] == "1" else []
def interrupted(*args, **given):
    while left:
        os.kill(os.getpid(), left.pop(0))
        time.sleep(REPEAT_S + 0.1)
    return write_shard(*args, **given)
writer.write_shard = interrupted
sys.exit(main(sys.argv[1:]))
"""


@in_parts("background", ["false", "true"], full=["true"])
def test_signals_within_a_save(background: str, tmp_path: Path) -> None:
    """The save is finished, and no step is lost."""
    script = tmp_path / "signals.py"
    script.write_text(SIGNALS.format(root=str(ROOT)))
    more = {"checkpoint.every": "3", "checkpoint.async_save": background, "parallel.pp": "2"}
    given = endless(tmp_path, **more)
    outcome = run_forked(tmp_path, 2, *given, script=str(script))
    outcome.assert_one_line(75, "stopped by a signal; saved step")
    last = int(outcome.errors[0].split("saved step ")[1].split()[0])
    checkpoints = tmp_path / "runs/run/checkpoints"
    for step in (3, last):
        Checkpoint.open(checkpoints / f"step-{step:08d}").verify()
    assert not list(checkpoints.glob(".staging*"))
    again = run_forked(tmp_path, 2, *given, f"train.stop_after={last + 1}")
    assert again.codes == [0, 0]
    assert f"at step {last} of" in again.text


VALIDATES = """
import os, signal, sys
sys.path.insert(0, {root!r})
from megapipe.train.step import evaluation
from megapipe.train.main import main
from megapipe import TrainStep
evaluation.MICROBATCHES = 1
forward, rank, begun = evaluation.Evaluator.run_forward, int(os.environ["RANK"]), []
def counted(*given):
    begun.append(given)
    os.write(1, f"rank {{rank}} begins forward {{len(begun)}}\\n".encode())
    if rank == 1 and len(begun) == 3:
        os.kill(os.getpid(), signal.SIGUSR1)
    return forward(*given)
evaluation.Evaluator.run_forward = counted
sys.exit(main(sys.argv[1:]))
"""


def test_a_signal_within_a_validation(tmp_path: Path) -> None:
    """It goes no further, the step before it is saved, and its loss is told by nobody."""
    script = tmp_path / "validates.py"
    script.write_text(VALIDATES.format(root=str(ROOT)))
    more = {"train.validate_every": "2", "train.validation_samples": "20", "parallel.pp": "2"}
    given = endless(tmp_path, **more)
    outcome = run_forked(tmp_path, 2, *given, script=str(script))
    outcome.assert_one_line(75, "stopped by a signal; saved step 2 of")
    for rank in range(2):
        assert f"rank {rank} begins forward 3\n" in outcome.text
        assert f"rank {rank} begins forward 4\n" not in outcome.text
    assert '"validation"' not in (tmp_path / "runs/run/log.jsonl").read_text()
    Checkpoint.open(tmp_path / "runs/run/checkpoints/step-00000002").verify()


SETS_UP = """
import os, sys, time
sys.path.insert(0, {root!r})
from megapipe.train import corpus, job, trainer
from megapipe.train.main import main
def stay(*_, **__):
    os.write(1, b"it stays\\n")
    time.sleep(600)
if os.environ["RANK"] == "{rank}":
    {place} = stay
main(sys.argv[1:])
"""


def test_an_interrupt_of_a_rank_on_its_way_to_the_store_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "sets_up.py"
    place = "job.rendezvous.open_store"
    script.write_text(SETS_UP.format(root=str(ROOT), place=place, rank=1))
    given = endless(tmp_path, **PATIENT, **{"parallel.pp": "2"})
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with Job(tmp_path) as job:
        job.start([str(script), *given], {**common, "RANK": "0"})
        job.await_store(int(common["MASTER_PORT"]))
        job.start([str(script), *given], {**common, "RANK": "1"})
        job.await_text("it stays")
        job.processes[1].send_signal(signal.SIGINT)
        job.end().assert_one_line(130, "rank 1 was interrupted (SIGINT)")


@in_parts("place", ["corpus.load_sources", "trainer.TrainStep"], full=["corpus.load_sources"])
def test_a_scheduler_stops_a_job_that_is_set_up(place: str, tmp_path: Path) -> None:
    """The signal comes to the rank that waits for one that tokenizes, or builds its model."""
    script = tmp_path / "sets_up.py"
    script.write_text(SETS_UP.format(root=str(ROOT), place=place, rank=0))
    given = endless(tmp_path, **PATIENT, **{"parallel.pp": "2"})
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with Job(tmp_path) as job:
        for rank in range(2):
            job.start([str(script), *given], {**common, "RANK": str(rank)})
        job.await_text("it stays")
        job.processes[1].send_signal(signal.SIGTERM)
        job.end().assert_one_line(75, "stopped by SIGTERM before the first step")


def test_a_scheduler_stops_a_rank_that_tokenizes(tmp_path: Path) -> None:
    """With processes of its own, which end with it; alone they would take many seconds."""
    tokenizer = tmp_path / "bpe.json"
    train_bpe(["</s>"]).save(str(tokenizer))
    given = {**tiny(tmp_path), "data.tokenizer": str(tokenizer), "data.tokenizer_workers": "2"}
    texts = tmp_path / "long.jsonl"
    row = json.dumps({"text": (tmp_path / "corpus.txt").read_text()}) + "\n"
    texts.write_text(row * 3000)
    with Job(tmp_path) as job:
        job.start(["train.py", *arguments(given | {"data.source": str(texts)})])
        while len([*job.alive()]) < 3:
            assert job.processes[0].poll() is None, job.text
            time.sleep(0.02)
        job.processes[0].send_signal(signal.SIGTERM)
        job.end().assert_one_line(75, "stopped by SIGTERM before the first step")
    assert not (tmp_path / "runs/run/checkpoints").exists()


def test_a_scheduler_stops_our_launcher_before_it_has_ranks(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.launch(2, *endless(tmp_path))
        job.await_handlers()
        job.processes[0].send_signal(signal.SIGTERM)
        job.end().assert_one_line(75, "stopped by SIGTERM before the ranks started")


@in_parts("number", [signal.SIGUSR1, signal.SIGKILL], full=[signal.SIGUSR1], ids=str)
def test_ranks_end_without_the_torchrun_that_has_started_them(
    number: signal.Signals, tmp_path: Path
) -> None:
    """It dies of both; the store dies with it."""
    with Job(tmp_path) as job:
        job.torchrun(2, *endless(tmp_path, **{"parallel.pp": "2"}))
        job.await_text("| loss")
        job.processes[0].send_signal(number)
        assert job.processes[0].wait(10) == -number
        deadline = time.monotonic() + 20
        while (left := list(job.alive())) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left


def test_notice_and_then_a_request_save_all(tmp_path: Path) -> None:
    """SIGUSR1 some time before SIGTERM, as a scheduler with a grace period sends them."""
    with Job(tmp_path) as job:
        job.start(["train.py", *endless(tmp_path)])
        job.await_text("| loss")
        job.processes[0].send_signal(signal.SIGSTOP)  # both come within one step
        job.processes[0].send_signal(signal.SIGUSR1)
        job.processes[0].send_signal(signal.SIGTERM)
        job.processes[0].send_signal(signal.SIGCONT)
        outcome = job.end()
    assert outcome.codes == [75]
    assert_saved(outcome, tmp_path)
