"""scripts/checkpoint.py with URLs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.checkpoint import Checkpoint
from megapipe.checkpoint.commands import main
from megapipe.checkpoint.names import POINTER, REMOVED
from megapipe.checkpoint.storage import StorageLocation, at
from tests.parity.object_server import BUCKET, ObjectServer
from tests.unit.checkpoint.checkpoint_worlds import save_alone, tensors


def out_of(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> str:
    found = main([str(word) for word in argv])
    said = capsys.readouterr()
    assert found == code, said.err
    assert said.err.count("\n") == bool(code)
    return said.out + said.err


def flip(store: ObjectServer, path: StorageLocation) -> None:
    key = f"{BUCKET}/run/{path.name}/00000-0000.safetensors"
    data = store.objects[key]
    store.put(key, data[:-1] + bytes([data[-1] ^ 1]))


def test_what_is_listed_read_and_shown(
    store: ObjectServer, root: StorageLocation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [save_alone(root, step) for step in (1, 2)]
    left = f"step-00000003-{'a' * 16}"
    store.put(f"{BUCKET}/run/{left}/00000-0000.safetensors", b"x")
    lines = out_of(capsys, "list", root).splitlines()
    assert lines[0] == f"{root}: 2 checkpoints"
    assert [line.split()[0] for line in lines[1:3]] == [path.name for path in paths]
    assert lines[1].endswith("dp 1, tp 1  intact")
    assert lines[3] == f"latest names {paths[1].name}"
    assert lines[4].startswith(f"{left}: being written")
    assert f"{paths[1]}: step 2 of run a-run\n" in out_of(capsys, "inspect", root)
    shown = out_of(capsys, "inspect", paths[0], "--tensors", "model/*")
    assert [line.split()[0] for line in shown.splitlines()] == sorted(
        name for name in tensors() if name.startswith("model/")
    )
    local = save_alone(tmp_path, 1)
    assert "7 of 7 tensors are bitwise equal" in out_of(capsys, "diff", local, root, "--equal")
    assert out_of(capsys, "verify", root).count(": intact, 1 file") == 2
    flip(store, paths[0])
    text = out_of(capsys, "verify", root, paths[0], code=5)
    assert text.count(f"{paths[0]}: DAMAGED: {paths[0]}/00000-0000.safetensors") == 2
    assert "2 of 3 checkpoints cannot be used" in text
    assert "has no checkpoints" in out_of(capsys, "list", f"{root}/none", code=5)


def test_what_is_removed(
    store: ObjectServer, root: StorageLocation, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sound checkpoint stays, and what may be a save under way."""
    paths = [save_alone(root, step) for step in (1, 2, 3)]
    attempt = f"step-00000004-{'a' * 16}"
    store.put(f"{BUCKET}/run/{attempt}/00000-0000.safetensors", b"x")
    text = out_of(capsys, "delete", root, "1", "2", "3", code=2)
    assert "this would delete the last intact checkpoint" in text
    text = out_of(capsys, "delete", root, "1", paths[2].name)
    assert text.count("removed ") == 2
    assert f"{root}/{POINTER} now names {paths[1].name}" in text
    assert at(root).names() == sorted([POINTER, REMOVED, paths[1].name, attempt])
    Checkpoint.open(paths[1]).verify()
    assert "restart the run" in out_of(capsys, "repair", root, code=2)
    assert attempt in at(root).names()
    out_of(capsys, "delete", root, "2", "--last")
    assert at(root).names() == sorted([REMOVED, attempt])


@pytest.mark.parametrize(
    ("url", "words", "code"),
    [
        ("nothing://x/y", "URL=nothing://x/y: Protocol not known: nothing", 5),
        ("s3://me:secret@bucket/x", "URL is a URL with a user name or password", 2),
    ],
)
def test_urls_that_cannot_be_used(
    url: str, words: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("list", "verify", "inspect"):
        text = out_of(capsys, command, url, code=code)
        assert words in text
        assert "secret" not in text
