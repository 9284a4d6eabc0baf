"""Bad input, launched for real: one line per job, a documented exit code, no process left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

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

pytestmark = pytest.mark.full

Prepare = Callable[[Path], dict[str, str]]


@dataclass(frozen=True)
class Bad:
    """What is wrong: settings, perhaps with files that `prepare` makes, and what is reported."""

    name: str
    code: int
    words: tuple[str, ...]
    prepare: Prepare


def settings(**wrong: str) -> Prepare:
    """Settings with ``section__key`` set wrongly."""
    return lambda folder: {key.replace("__", "."): value for key, value in wrong.items()}


def source(name: str, content: bytes | None) -> Prepare:
    """A corpus file with this content; None: there is none."""

    def prepare(folder: Path) -> dict[str, str]:
        path = folder / name
        if content is not None:
            path.write_bytes(content)
        return {"data.source": str(path)}

    return prepare


def no_example(folder: Path) -> dict[str, str]:
    """Rows of which the second has no completion."""
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "c"}\n')
    return {"data.source": str(folder / "rows.jsonl"), "data.samples": "supervised"}


def pipe(folder: Path) -> dict[str, str]:
    os.mkfifo(folder / "pipe.txt")
    return {"data.source": str(folder / "pipe.txt")}


def forbidden(folder: Path) -> dict[str, str]:
    path = folder / "forbidden.txt"
    path.write_text("text")
    path.chmod(0)
    return {"data.source": str(path)}


def occupied_folder(key: str) -> Prepare:
    """A file where a folder should be made."""

    def prepare(folder: Path) -> dict[str, str]:
        (folder / "file").write_text("")
        return {key: str(folder / "file" / "inside")}

    return prepare


def foreign_token(folder: Path) -> dict[str, str]:
    """A cached token file with one id beyond the vocabulary, in the middle."""
    from megapipe.data.prepare import prepare
    from megapipe.data.tokenizer import load_tokenizer
    from megapipe.data.tokens.checksums import write_checksums
    from megapipe.data_config import DataConfig

    given = tiny(folder)
    config = DataConfig(source=given["data.source"], cache=given["data.cache"])
    made = prepare(config, load_tokenizer("byte"), progress=False)
    tokens = np.memmap(made.folder / "train.bin", dtype="<u2", mode="r+")
    tokens[len(tokens) // 2] = 300
    tokens.flush()
    write_checksums(made.folder / "train")
    return {"train.steps": "1000", "optimizer.schedule": "constant", "log.every": "1000"}


EARLY = [
    Bad("key", 2, ("model.hiden", "model.hidden"), settings(model__hiden="16")),
    Bad("type", 2, ("model.hidden=wide", "expected"), settings(model__hidden="wide")),
    Bad("layout", 2, ("model.heads=3", "hidden"), settings(model__heads="3")),
    Bad(
        "schedule",
        2,
        ("pipeline.schedule=no/own.csv", "No such file"),
        settings(pipeline__schedule="no/own.csv"),
    ),
    Bad("world size", 4, ("world size",), settings(parallel__pp="3")),
    Bad("tokenizer", 3, ("tokenizer",), settings(data__tokenizer="./no/such/folder")),
]
BEFORE_DATA = [
    Bad("run folder", 2, ("run.folder",), occupied_folder("run.folder")),
    Bad(
        "kernel",
        2,
        ("kernels.attention=flash_attn", "expected auto"),
        settings(kernels__attention="flash_attn"),
    ),
    Bad("checkpoint", 5, ("checkpoint.load", "gone"), settings(checkpoint__load="./gone")),
]
LATE = [
    Bad("missing corpus", 3, ("no such file", "gone.txt"), source("gone.txt", None)),
    Bad("empty corpus", 3, ("empty",), source("empty.txt", b"")),
    Bad("corpus is a pipe", 3, ("pipe.txt", "regular file"), pipe),
    Bad("corpus is junk", 3, ("junk.parquet", "cannot be read"), source("junk.parquet", b"PAR1x")),
    Bad("corpus is not UTF-8", 3, ("latin.txt", "offset 3"), source("latin.txt", b"caf\xe9 noir")),
    Bad("cache", 3, ("data.cache",), occupied_folder("data.cache")),
    Bad("no example", 3, ("rows.jsonl: line 2 has neither 'messages'", "prompt"), no_example),
    Bad(
        "no mark",
        3,
        ("tokenizer 'byte' has no token '<p>' (data.fim_tokens)",),
        settings(data__fim_rate="0.5", data__fim_tokens="[<p>, <s>, <m>]"),
    ),
    Bad("token id", 3, ("token id 300", "0 to 256", "train.bin"), foreign_token),
    Bad("numbers", 6, ("not finite",), settings(optimizer__lr="1e38", optimizer__clip="null")),
]
if os.geteuid() != 0:  # permissions do not bind root
    LATE.append(Bad("unreadable corpus", 3, ("forbidden.txt", "Permission"), forbidden))


ALL = [*EARLY, *BEFORE_DATA, *LATE]


def overridden(folder: Path, bad: Bad) -> list[str]:
    return arguments({**tiny(folder), **bad.prepare(folder)})


@pytest.mark.parametrize("bad", [EARLY[0], LATE[0]], ids=lambda bad: bad.name)
def test_under_torchrun(bad: Bad, tmp_path: Path) -> None:
    run_torchrun(tmp_path, 2, *overridden(tmp_path, bad)).assert_one_line(bad.code, *bad.words)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(
            bad, marks=[] if bad in (EARLY[0], BEFORE_DATA[0], LATE[0]) else pytest.mark.slow
        )
        for bad in ALL
    ],
    ids=lambda bad: bad.name,
)
def test_under_our_launcher(bad: Bad, tmp_path: Path) -> None:
    """Which adds nothing to the line and hands on the exit code."""
    outcome = run_launched(tmp_path, 2, *overridden(tmp_path, bad))
    assert_reported(bad, outcome, tmp_path)


@pytest.mark.parametrize("bad", ALL, ids=lambda bad: bad.name)
def test_by_two_ranks(bad: Bad, tmp_path: Path) -> None:
    assert_reported(bad, run_forked(tmp_path, 2, *overridden(tmp_path, bad)), tmp_path)


def assert_reported(bad: Bad, outcome: Outcome, folder: Path) -> None:
    outcome.assert_one_line(bad.code, *bad.words)
    if bad not in LATE:
        assert len(outcome.text.splitlines()) == 1, outcome.text
        assert not (folder / "cache").exists(), "a corpus was prepared for nothing"


@pytest.mark.parametrize("bad", [*EARLY, LATE[0]], ids=lambda bad: bad.name)
def test_as_one_process(bad: Bad, tmp_path: Path) -> None:
    run_forked(tmp_path, 1, *overridden(tmp_path, bad)).assert_one_line(bad.code, *bad.words)


def test_a_compiler_that_fails_is_told_before_data_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    given = {**tiny(tmp_path), "kernels.compile": "true", "parallel.device": "cpu"}
    outcome = run_plain(tmp_path, *arguments(given))
    outcome.assert_one_line(2, "kernels.compile=true", "no-such-compiler", "expected false")
    assert not (tmp_path / "cache").exists()


def test_a_key_that_every_rank_has_wrong_is_reported_once_without_a_launcher(
    tmp_path: Path,
) -> None:
    """With interpreters of their own, as no launcher has them."""
    wrong = [*arguments(tiny(tmp_path)), "model.hiden=16"]
    with Job(tmp_path) as job:
        job.ranks(2, {0: wrong, 1: wrong})
        job.end().assert_one_line(2, "model.hiden")


def test_a_key_that_only_one_rank_has_wrong_ends_all(tmp_path: Path) -> None:
    good = arguments(tiny(tmp_path))
    with Job(tmp_path) as job:
        job.ranks(2, {0: good, 1: [*good, "model.hiden=16"]})
        job.end().assert_one_line(2, "model.hiden")


def test_ranks_that_disagree(tmp_path: Path) -> None:
    good = arguments(tiny(tmp_path))
    with Job(tmp_path) as job:
        job.ranks(2, {0: good, 1: [*good, "optimizer.lr=0.5", "run.seed=3"]})
        words = ("optimizer.lr is 0.0003 on rank 0 but 0.5 on rank 1", "run.seed is 1234", "3 on")
        job.end().assert_one_line(4, "the ranks disagree", *words)


@pytest.mark.parametrize(("present", "words"), [(0, "1 of 2 ranks arrived"), (1, "rendezvous at")])
def test_a_rank_that_never_arrives(tmp_path: Path, present: int, words: str) -> None:
    given = arguments({**tiny(tmp_path), "parallel.timeout_s": "3"})
    with Job(tmp_path) as job:
        job.ranks(2, {present: given})
        job.end().assert_one_line(4, words, "3 s (parallel.timeout_s)")


def test_an_occupied_port(tmp_path: Path) -> None:
    given = arguments(tiny(tmp_path))
    with socket.socket() as other, Job(tmp_path) as job:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        job.ranks(2, {0: given, 1: given}, port)
        job.end().assert_one_line(4, f"127.0.0.1:{port}", "in use", "MASTER_PORT")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_its_peers(tmp_path: Path, killed: int) -> None:
    """Rank 0 takes the store with it."""
    given = arguments({**tiny(tmp_path), **ENDLESS, "parallel.pp": "2"})
    with Job(tmp_path) as job:
        job.ranks(2, {0: given, 1: given})
        job.await_text("| loss")
        job.processes.pop(killed).kill()
        job.end().assert_one_line(4, f"rank {1 - killed} lost")


def test_a_killed_rank_ends_its_peers_under_torchrun(tmp_path: Path) -> None:
    given = arguments({**tiny(tmp_path), **ENDLESS, "parallel.tp": "2"})
    with Job(tmp_path) as job:
        job.torchrun(2, *given)
        job.await_text("| loss")
        os.kill(job.pids()[1], signal.SIGKILL)
        job.end().assert_one_line(-9, "rank 0 lost contact")


def test_output_that_nobody_reads_does_not_end_a_run(tmp_path: Path) -> None:
    given = arguments({**tiny(tmp_path), "train.steps": "30"})
    with Job(tmp_path) as job:
        process = job.start(["train.py", *given], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        outcome = job.end()
    assert outcome.codes == [0]
    assert outcome.text.startswith("megapipe: console does not take records")
    assert len(outcome.text.splitlines()) == 1
    assert (tmp_path / "runs/run/checkpoints/step-00000030/manifest.json").exists()


@pytest.mark.parametrize("given", ["--help", "--dry-run"])
def test_a_reader_that_has_read_enough(tmp_path: Path, given: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with Job(tmp_path) as job:
        job.start(["train.py", given], stdout=writer)
        os.close(writer)
        outcome = job.end()
    assert (outcome.codes, outcome.text) == ([0], "")


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
