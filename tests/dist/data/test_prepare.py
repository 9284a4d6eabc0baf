"""Preparations by several processes at once, by ones that are killed, and by the command."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megapipe.config.data import DataConfig
from megapipe.data.prepare import prepare
from megapipe.data.tokenizer import ByteTokenizer
from tests.parity.prepared import Barred, texts_of
from tests.unit.data.data_cases import TEXTS

BYTE = ByteTokenizer()


SCRIPT = """
import os, sys, time
from pathlib import Path
from megapipe.config.data import DataConfig
from megapipe.data.prepare import prepare
from megapipe.data.tokenizer import ByteTokenizer

class Waiting(ByteTokenizer):
    def encode_batch(self, texts):
        Path(sys.argv[2] + "." + str(os.getpid())).touch()
        while len(list(Path(sys.argv[2]).parent.glob("go.*"))) < int(sys.argv[3]):
            time.sleep(0.01)
        return super().encode_batch(texts)

prepared = prepare(DataConfig.model_validate_json(sys.argv[1]), Waiting())
print(prepared.folder, prepared.meta.train.tokens)
"""


def start(config: DataConfig, go: Path, needed: int) -> "subprocess.Popen[str]":
    """Prepares in another process, which waits in the middle until `needed` processes are there."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, config.model_dump_json(), str(go), str(needed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_of_processes_at_once_one_prepares(folder_config: DataConfig, tmp_path: Path) -> None:
    maker = start(folder_config, tmp_path / "go", 2)
    wait_for(lambda: list(tmp_path.glob("go.*")))
    others = [start(folder_config, tmp_path / "go", 2) for _ in range(2)]
    assert others[0].stderr is not None
    line = others[0].stderr.readline()
    assert line.startswith(f"megapipe: waiting for process {maker.pid} on {socket.gethostname()}, ")
    assert len(list(tmp_path.glob("go.*"))) == 1
    (tmp_path / "go.on").touch()
    results = [process.communicate(timeout=60)[0] for process in (maker, *others)]
    assert [process.returncode for process in (maker, *others)] == [0, 0, 0]
    assert len(list(tmp_path.glob("go.*"))) == 2, "nobody else tokenized"
    prepared = prepare(folder_config, Barred())
    assert results == [f"{prepared.folder} {prepared.meta.train.tokens}\n"] * 3
    assert list(Path(folder_config.cache).iterdir()) == [prepared.folder]
    assert sorted(texts_of(prepared, "train") + texts_of(prepared, "validation")) == sorted(TEXTS)


def test_a_killed_process_leaves_no_corpus(
    folder_config: DataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start(folder_config, tmp_path / "go", 2)
    wait_for(lambda: list(tmp_path.glob("go.*")))
    process.kill()
    process.communicate()
    left = list(Path(folder_config.cache).iterdir())
    assert len(left) == 2
    assert all(folder.name.startswith(".") for folder in left)
    assert list(Path(folder_config.cache).glob(".*.parts/.000000.*.bin"))

    prepared = prepare(folder_config, BYTE)
    assert len(texts_of(prepared, "train")) == prepared.meta.train.documents
    assert f"process {process.pid} on {socket.gethostname()}, which " in capsys.readouterr().err
    assert list(Path(folder_config.cache).iterdir()) == [prepared.folder]


def test_stdlib(tmp_path: Path) -> None:
    prepared = prepare(DataConfig(cache=str(tmp_path)), BYTE)
    meta = prepared.meta
    text = meta.train.text_bytes + meta.validation.text_bytes
    assert text > 5e6
    assert meta.train.tokens + meta.validation.tokens == (
        text + meta.train.documents + meta.validation.documents
    )
    assert 0.005 < meta.validation.text_bytes / text < 0.06
    assert 3.0 < meta.entropy < 3.5


def test_command(folder_config: DataConfig, tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "scripts" / "prepare_data.py"

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=60
        )

    options = ["--source", folder_config.source, "--cache", folder_config.cache]
    done = run(*options)
    assert (done.returncode, done.stderr) == (0, "")
    prepared = prepare(folder_config, Barred())
    assert done.stdout.startswith(f"{prepared.folder} (")
    assert f"{prepared.meta.train.tokens:,} tokens" in done.stdout
    assert json.loads((prepared.folder / "meta.json").read_text())["source"] in options

    assert "merge" in run("--help").stdout
    shown = run("tokenize", "--help").stdout
    assert "--validation-fraction" in shown
    assert "-mask" not in shown, "masks are of training"
    for wrong, code, says in (
        (["--source", str(tmp_path / "none.txt")], 3, "no such file or folder"),
        (
            ["--validation-fraction", "2"],
            2,
            "--validation-fraction 2.0: expected a number >= 0 and < 1",
        ),
    ):
        failed = run(*options, *wrong)
        assert failed.returncode == code
        assert failed.stderr.count("\n") == 1
        assert failed.stderr.startswith("megapipe: error: ")
        assert says in failed.stderr
