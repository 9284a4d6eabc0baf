"""What killed preparations leave in a cache is removed by the next one or the next run, and nothing
else is."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import cast

import pytest

from megapipe.config.config import Config
from megapipe.config.data import DataConfig
from megapipe.data.prepare import prepare
from megapipe.data.prepare.build_once import build_once
from megapipe.data.prepare.leftovers import KEPT_S, MAKER, SILENT_S
from megapipe.data.tokenizer import load_tokenizer
from megapipe.distributed.mesh import ParallelMesh
from megapipe.train.corpus import prepare_on_all
from megapipe.util import heartbeat
from tests.unit.train.stub_run import Mesh


def leave(cache: Path, name: str, *, age: float = 0.0, **maker: object) -> Path:
    """Leave a folder with a file of 2 MB, and with a maker if any field of one is given."""
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / "000000.bin").write_bytes(bytes(2_000_000))
    if maker:
        me = vars(heartbeat.Owner.this_process())
        (folder / MAKER).write_text(json.dumps({**me, **maker}))
    then = time.time() - age
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))
    return folder


def make(cache: Path) -> list[str]:
    """Return the lines of a preparation in the cache."""
    lines: list[str] = []
    build_once(cache / "new", lambda new: (new / "content").touch(), lines.append)
    return lines


DEAD = {"process": 2**22 + 1}
ELSEWHERE = {"machine": "far", "host": "far"}


def test_a_run_removes_them_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 50)
    cache = tmp_path / "cache"
    leave(cache, ".deadbeef.1", **DEAD)
    parts = leave(cache, ".deadbeef.parts")
    config = DataConfig(source=str(text), cache=str(cache))
    made = prepare(config, load_tokenizer("byte"), progress=False)
    assert capfd.readouterr().err == (
        f"megapipe: removed 1 folder, 2.0 MB, that killed preparations had left in {cache}\n"
    )
    assert sorted(cache.iterdir()) == sorted([parts, made.folder]), "parts are kept for a week"


def test_a_run_that_finds_its_corpus_prepared_does_so_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One process of each node removes the folders."""
    text, cache = tmp_path / "text.txt", tmp_path / "cache"
    text.write_text("one two three " * 50)
    config = Config(data=DataConfig(source=str(text), cache=str(cache)))
    made = prepare(config.data, load_tokenizer("byte"), progress=False)
    left = leave(cache, ".deadbeef.1", **DEAD)
    for local_rank in (1, 0):
        assert left.exists()
        mesh = cast(ParallelMesh, Mesh(local_rank))
        prepare_on_all(config, load_tokenizer("byte"), mesh, local_rank=local_rank)
    assert [*cache.iterdir()] == [made.folder]
    line = f"removed 1 folder, 2.0 MB, that killed preparations had left in {cache}\n"
    assert capfd.readouterr().err == f"megapipe: {line}"


def test_parts_are_kept_for_a_week_or_until_they_are_of_no_use(tmp_path: Path) -> None:
    young = leave(tmp_path, ".aa.parts", age=KEPT_S - 600)
    old = leave(tmp_path, ".bb.parts", age=KEPT_S + 600)
    (tmp_path / "cc").mkdir()
    used = leave(tmp_path, ".cc.parts")
    resumed = leave(tmp_path, ".dd.parts", age=KEPT_S + 600)
    maker = leave(tmp_path, ".dd.1", age=KEPT_S + 600, count=3)  # this process
    last_part = leave(tmp_path, ".ee.parts", age=KEPT_S + 600)
    (last_part / "000007.bin").touch()
    copied = leave(tmp_path, ".remote-ff.parts", age=KEPT_S + 600)
    lines = make(tmp_path)
    assert lines == [f"removed 3 folders, 6.0 MB, that killed preparations had left in {tmp_path}"]
    assert not old.exists()
    assert not used.exists()
    assert not copied.exists()
    assert all(path.exists() for path in (young, resumed, maker, last_part))


def test_the_clock_of_this_machine_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of files are the file system's."""
    parts = leave(tmp_path, ".aa.parts", age=KEPT_S - 600)
    far = leave(tmp_path, ".bb.1", age=SILENT_S - 600, **ELSEWHERE)
    monkeypatch.setattr(time, "time", lambda: 1e10)
    assert make(tmp_path) == []
    assert parts.exists()
    assert far.exists()


def test_makers_that_cannot_be_looked_for_are_gone_after_a_day(tmp_path: Path) -> None:
    digest = "0123456789abcdef" * 4
    beating = leave(tmp_path, ".aa.1", age=SILENT_S - 600, **ELSEWHERE)
    silent = leave(tmp_path, ".bb.1", age=SILENT_S + 600, **ELSEWHERE)
    unsaid = leave(tmp_path, f".{digest}.1", age=SILENT_S + 600)
    beginning = leave(tmp_path, f".{digest[::-1]}.1", age=SILENT_S - 600)
    make(tmp_path)
    assert [path.exists() for path in (beating, silent, unsaid, beginning)] == [
        True, False, False, True,
    ]  # fmt: skip


def test_what_is_no_leftover_stays(tmp_path: Path) -> None:
    """A user's own folders of such names, a living maker that has taken over from a dead one, and
    a link."""
    mine = leave(tmp_path, ".backup.1", age=99 * KEPT_S)
    parts = leave(tmp_path, ".words.parts", age=99 * KEPT_S)
    first, second = leave(tmp_path, ".aa.1", **DEAD), leave(tmp_path, ".aa.2", count=1)
    target = leave(tmp_path / "other", "x", **DEAD)
    (tmp_path / ".bb.1").symlink_to(target)
    (tmp_path / ".cc.1").touch()
    assert make(tmp_path) == []
    for path in (mine, parts, first, second, target, tmp_path / ".bb.1", tmp_path / ".cc.1"):
        assert path.exists()


def test_a_maker_of_another_user_that_the_system_hides_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hidepid a process is known to be there, and nothing else of it."""
    left = leave(tmp_path, ".aa.1", count=1)
    monkeypatch.setattr(heartbeat, "start_of", lambda _: 0.0)
    assert make(tmp_path) == []
    assert left.exists()


def test_one_that_is_just_being_begun_with_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = leave(tmp_path, ".aa.1", **DEAD)
    mkdir = Path.mkdir

    def too_late(path: Path, *given: object, **named: object) -> None:
        mkdir(path, *given, **named)  # type: ignore[arg-type]
        if path.name == ".aa.2":
            raise FileExistsError

    monkeypatch.setattr(Path, "mkdir", too_late)
    assert make(tmp_path) == []
    assert left.exists()
