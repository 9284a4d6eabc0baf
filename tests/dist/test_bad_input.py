"""Bad input, launched for real: one line per job, a documented exit code, no process left.

The table is in ``tests/parity/bad_input``; its cases are started as two ranks or more, each a
process of its own, but for the start of the interpreter (``tests/parity/launches.py``).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.config.keys import SECTIONS
from tests.parity.bad_folder import make_folder
from tests.parity.bad_input.case import TIMEOUT_S, Bad
from tests.parity.bad_input.table import TABLE, named
from tests.parity.jobs import (
    ENDLESS,
    ROOT,
    Job,
    Outcome,
    arguments,
    run_launched,
    run_plain,
    run_torchrun,
    tiny,
)
from tests.parity.launches import run_forked
from tests.parity.tiers import in_parts

LAUNCHED = named("a key of the model with a typing mistake",
                 "kernels.only.attention is not installed", "no such file for a corpus",
                 "load of nothing", "no such tokenizer", "numbers that are not finite")  # fmt: skip
"""Cases for launchers: from before the processes meet, before the corpus and after it."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "made"
    make_folder(folder)
    return folder


def folder_of(bad: Bad, made: Path, parent: Path) -> Path:
    """Prepare the case in a folder of its own, and return that."""
    folder = Path(shutil.copytree(made, parent / "here", symlinks=True))
    bad.prepare(folder)
    return folder


def run(bad: Bad, folder: Path, ranks: int) -> Outcome:
    return run_forked(
        folder,
        ranks,
        *bad.arguments(folder),
        environ=bad.environ,
        places=bad.places,
        privileged=bad.privileged,
    )


def placed(bad: Bad, folder: Path) -> list[str]:
    """Return the arguments of the case for another current folder."""
    usual = f"data.source={folder / 'texts.txt'}"
    given = [usual if one == "data.source=texts.txt" else one for one in bad.arguments(folder)]
    return [*given, f"run.folder={folder / 'runs'}", f"data.cache={folder / 'cache'}"]


def assert_reported(bad: Bad, outcome: Outcome, folder: Path) -> None:
    outcome.assert_one_line(bad.code, *bad.words)
    assert "Traceback" not in outcome.text
    assert not (folder / "canary").exists(), "what was read has run a command"
    if bad.before_groups:
        assert not (folder / "runs").exists(), "the folder of the run is made once there are groups"
    if not bad.late:
        ours = [line for line in outcome.text.splitlines() if not line.startswith("[Gloo] ")]
        assert len(ours) == 1, outcome.text  # torch 2.10 has lines of its own
        assert not (folder / "cache").exists(), "a corpus was prepared for nothing"


def test_the_table_is_long_and_wide() -> None:
    assert len({bad.name for bad in TABLE}) == len(TABLE) >= 120
    assert all(bad.ranks >= 2 for bad in TABLE)
    told = " ".join(word for bad in TABLE for word in bad.words)
    assert [name for name in SECTIONS if f"{name}." not in told] == []
    assert {bad.code for bad in TABLE} == {2, 3, 4, 5, 6, 7}


@in_parts("bad", TABLE, default=63, full=18, ids=lambda bad: bad.name)
def test_by_two_ranks_or_more(bad: Bad, made: Path, tmp_path: Path) -> None:
    folder = folder_of(bad, made, tmp_path)
    outcome = run(bad, folder, bad.ranks)
    assert_reported(bad, outcome, folder)
    assert outcome.seconds < TIMEOUT_S, "a rank has waited for another one"


@in_parts("bad", LAUNCHED[0:3:2], full=2, ids=lambda bad: bad.name)
def test_under_torchrun(bad: Bad, made: Path, tmp_path: Path) -> None:
    folder = folder_of(bad, made, tmp_path)
    outcome = run_torchrun(tmp_path, 2, *placed(bad, folder))
    outcome.assert_one_line(bad.code, *bad.words)


@in_parts("bad", LAUNCHED, default=LAUNCHED[:1], ids=lambda bad: bad.name)
def test_under_our_launcher(bad: Bad, made: Path, tmp_path: Path) -> None:
    """Which adds nothing to the line and hands on the exit code."""
    folder = folder_of(bad, made, tmp_path)
    assert_reported(bad, run_launched(tmp_path, 2, *placed(bad, folder)), folder)


@pytest.mark.full
@pytest.mark.parametrize("bad", LAUNCHED[:3], ids=lambda bad: bad.name)
def test_as_one_process(bad: Bad, made: Path, tmp_path: Path) -> None:
    folder = folder_of(bad, made, tmp_path)
    run(bad, folder, 1).assert_one_line(bad.code, *bad.words)


@pytest.mark.full
def test_an_error_with_its_traceback(tmp_path: Path) -> None:
    """It says where the error arose, also in user code; the error's line is the last and only
    one."""
    (tmp_path / "own.py").write_text("def f(ranks, microbatches):\n    raise ValueError('no')\n")
    given = [*arguments(tiny(tmp_path)), "pipeline.schedule=own:f"]
    for wrong, place in ((["--traceback"], "own.py"), (["--traceback", "log.every=0"], "cli.py")):
        outcome = run_forked(tmp_path, 2, *given, *wrong)
        assert (outcome.codes, len(outcome.errors)) == ([2, 2], 1)
        assert outcome.text.count("Traceback (most recent call last)") >= 1
        assert place in outcome.text
        assert outcome.text.splitlines()[-1] == outcome.errors[0]


@pytest.mark.slow
def test_a_compiler_that_fails_is_told_before_data_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    given = {**tiny(tmp_path), "kernels.compile": "true", "parallel.device": "cpu"}
    outcome = run_plain(tmp_path, *arguments(given))
    outcome.assert_one_line(2, "kernels.compile=true", "no-such-compiler", "expected false")
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_key_that_every_rank_has_wrong_is_reported_once_without_a_launcher(
    tmp_path: Path,
) -> None:
    """With interpreters of their own, as no launcher has them."""
    wrong = [*arguments(tiny(tmp_path)), "model.hiden=16"]
    with Job(tmp_path) as job:
        job.ranks(2, {0: wrong, 1: wrong})
        job.end().assert_one_line(2, "model.hiden")


@pytest.mark.full
def test_a_key_that_only_one_rank_has_wrong_ends_all(tmp_path: Path) -> None:
    outcome = run_forked(tmp_path, 2, *arguments(tiny(tmp_path)), last=["model.hiden=16"])
    outcome.assert_one_line(2, "model.hiden")


@pytest.mark.slow
def test_ranks_that_disagree(tmp_path: Path) -> None:
    other = ["optimizer.lr=0.5", "run.seed=3"]
    outcome = run_forked(tmp_path, 2, *arguments(tiny(tmp_path)), last=other)
    words = ("optimizer.lr is 0.0003 on rank 0 but 0.5 on rank 1", "run.seed is 1234", "3 on")
    outcome.assert_one_line(4, "the ranks disagree", *words)


@in_parts(
    ("present", "words"),
    [(0, "1 of 2 ranks arrived"), (1, "rendezvous at")],
    full=[(1, "rendezvous at")],
)
def test_a_rank_that_never_arrives(tmp_path: Path, present: int, words: str) -> None:
    given = arguments({**tiny(tmp_path), "parallel.timeout_s": "3"})
    with Job(tmp_path) as job:
        job.ranks(2, {present: given})
        job.end().assert_one_line(4, words, "3 s (parallel.timeout_s)")


@pytest.mark.full
def test_an_occupied_port(tmp_path: Path) -> None:
    given = arguments(tiny(tmp_path))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        outcome = run_forked(tmp_path, 2, *given, places={"MASTER_PORT": str(port)})
    outcome.assert_one_line(4, f"127.0.0.1:{port}", "in use", "MASTER_PORT")


@in_parts("killed", [0, 1], full=[0])
def test_a_killed_rank_ends_its_peers(tmp_path: Path, killed: int) -> None:
    """Rank 0 takes the store with it."""
    given = arguments({**tiny(tmp_path), **ENDLESS, "parallel.pp": "2"})
    with Job(tmp_path) as job:
        job.ranks(2, {0: given, 1: given})
        job.await_text("| loss")
        job.processes.pop(killed).kill()
        job.end().assert_one_line(4, f"rank {1 - killed} lost")


@pytest.mark.slow
def test_a_killed_rank_ends_its_peers_under_torchrun(tmp_path: Path) -> None:
    given = arguments({**tiny(tmp_path), **ENDLESS, "parallel.tp": "2"})
    with Job(tmp_path) as job:
        job.torchrun(2, *given)
        job.await_text("| loss")
        os.kill(job.pids()[1], signal.SIGKILL)
        job.end().assert_one_line(-9, "rank 0 lost contact")


@pytest.mark.full
def test_output_that_nobody_reads_does_not_end_a_run(tmp_path: Path) -> None:
    given = arguments({**tiny(tmp_path), "train.steps": "30"})
    with Job(tmp_path) as job:
        process = job.start(["train.py", *given], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        outcome = job.end()
    assert outcome.codes == [0]
    assert outcome.text.startswith("megapipe: console does not accept records")
    assert len(outcome.text.splitlines()) == 1
    assert (tmp_path / "runs/run/checkpoints/step-00000030/manifest.json").exists()


@pytest.mark.full
@pytest.mark.parametrize("given", ["--help", "--dry-run"])
def test_a_reader_that_has_read_enough(tmp_path: Path, given: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with Job(tmp_path) as job:
        job.start(["train.py", given], stdout=writer)
        os.close(writer)
        outcome = job.end()
    assert (outcome.codes, outcome.text) == ([0], "")


@pytest.mark.full
@pytest.mark.parametrize("given", [["--help"], ["--dry-run"], ["model.hiden=16"]])
def test_closed_streams(tmp_path: Path, given: list[str]) -> None:
    """Neither stream open, as under some init systems: the exit code still says what was."""
    script = 'exec "$0" train.py "$@" >&- 2>&-'
    code = subprocess.run(
        ["bash", "-c", script, sys.executable, *given],
        cwd=ROOT,
        timeout=60,
    ).returncode
    assert code == (2 if "=" in given[0] else 0)


NO_TEMPORARY_FOLDER = """
import sys, tempfile
sys.path.insert(0, {root!r})
tempfile.tempdir, tempfile._candidate_tempdir_list = None, lambda: ["/nowhere"]
from megapipe.train.main import main
main(sys.argv[1:])
"""


def test_ranks_without_a_folder_for_temporary_files(tmp_path: Path) -> None:
    """They cannot meet, as torch cannot be loaded."""
    script = tmp_path / "none.py"
    script.write_text(NO_TEMPORARY_FOLDER.format(root=str(ROOT)))
    given = arguments({**tiny(tmp_path), "parallel.pp": "2"})
    outcome = run_forked(tmp_path, 2, *given, script=str(script))
    outcome.assert_one_line(4, "no temporary file can be written to ['/nowhere']: free space")
    assert outcome.seconds < TIMEOUT_S
