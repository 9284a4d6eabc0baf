"""A folder that one process makes: makers that fail, that are far away, and that only slept."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megapipe.data.prepare.build_once import MAKER, build_once
from megapipe.util import heartbeat


def content(text: str = "x") -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "content").write_text(text)

    return fill


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setattr(heartbeat, "STALE_S", 0.5)
    monkeypatch.setattr(heartbeat, "POLL_S", (0.01, 0.01))


def leave_attempt(folder: Path, number: int, **maker: object) -> Path:
    """Leave behind the attempt of a maker that ended."""
    attempt = folder.with_name(f".{folder.name}.{number}")
    attempt.mkdir(parents=True)
    told = {"host": "far", "machine": "far", "process": os.getpid(), "began": 0.0, **maker}
    (attempt / MAKER).write_text(json.dumps(told))
    return attempt


def make(folder: Path) -> list[str]:
    lines: list[str] = []
    build_once(folder, content(), lines.append)
    assert [path.name for path in folder.iterdir()] == ["content"]
    assert list(folder.parent.iterdir()) == [folder]
    return lines


def test_the_first_makes_it_and_others_find_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "corpus"
    assert make(folder) == []
    build_once(folder, content("y"))
    assert (folder / "content").read_text() == "x"


def test_an_error_leaves_nothing_and_the_next_one_begins_anew(tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_once(tmp_path / "corpus", fail)
    assert list(tmp_path.iterdir()) == []
    assert make(tmp_path / "corpus") == []


def test_a_maker_elsewhere_is_gone_when_its_count_stands_still(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    leave_attempt(folder, 1)
    leave_attempt(folder, 10)
    who = f"process {os.getpid()} on far"
    assert make(folder) == [
        f"waiting for {who}, which prepares {folder}",
        f"{who}, which prepared {folder}, is gone: taking over",
    ]


def test_one_that_did_not_say_who_it_is_is_waited_for_as_long(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.with_name(".corpus.1").mkdir()
    (line,) = make(folder)
    assert line.startswith("an unknown process, ")


@pytest.mark.parametrize("change", [{"process": 2**22 + 1}, {"began": 1.0}])
def test_a_process_of_this_machine_that_is_not_there_is_gone_at_once(
    tmp_path: Path, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is a process whose number another process has now."""
    monkeypatch.setattr(heartbeat, "STALE_S", 1e9)
    me = heartbeat.Owner.this_process()
    told = {"host": me.host, "machine": me.machine, "process": me.process, "began": me.began}
    assert not heartbeat.Owner(**told).ended  # type: ignore[arg-type]
    leave_attempt(tmp_path / "corpus", 1, **{**told, **change})
    (line,) = make(tmp_path / "corpus")
    assert line.endswith("is gone: taking over")


def test_a_maker_that_counts_is_waited_for_and_one_that_slept_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting one looks for four times as long as a count may stand still. Then it is made to
    think that the maker is gone: both finish, and one of the two is kept, whole."""
    folder = tmp_path / "corpus"
    go, waited, lines = threading.Event(), threading.Event(), list[str]()

    def fill(own: Path) -> None:
        assert go.wait(30)
        content("first")(own)

    first = threading.Thread(target=build_once, args=(folder, fill))
    first.start()
    while not folder.with_name(".corpus.1").exists():
        pass
    second = threading.Thread(target=build_once, args=(folder, content("second"), lines.append))
    second.start()
    waited.wait(4 * heartbeat.STALE_S)
    assert second.is_alive()
    assert len(lines) == 1, lines
    monkeypatch.setattr(heartbeat, "STALE_S", -1.0)
    second.join(30)
    assert (folder / "content").read_text() == "second"
    go.set()
    first.join(30)
    assert not first.is_alive()
    assert not second.is_alive()
    assert (folder / "content").read_text() == "second"
    assert list(tmp_path.iterdir()) == [folder]
