"""Folders and links in the way of a run's files are told before anything takes time."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest

from megapipe.checkpoint.run_lock import OWNER
from megapipe.cli import parse
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import ConfigError, MegapipeError
from megapipe.train import run_folder
from megapipe.util import heartbeat
from tests.unit.train.stub_run import Mesh

pytestmark = pytest.mark.usefixtures("without_git")


def take(folder: Path) -> run_folder.RunFolder:
    return run_folder.claim_run_folder(folder, cast(ParallelMesh, Mesh(0)), local_rank=0)


@pytest.mark.parametrize("name", run_folder.FILES)
def test_a_folder_in_the_place_of_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"run.folder: .*{name} is a folder: expected a file"):
        take(tmp_path)


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, 5), (errno.EDQUOT, 5), (errno.EIO, 5), (errno.EROFS, 2)]
)
def test_a_disk_that_is_full_or_fails_is_no_mistake_in_the_configuration(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    for module, name in ((run_folder, "RunLock"), (run_folder, "write_no_symlinks")):
        monkeypatch.setattr(module, name, fail)
    told = f"run.folder: cannot write to {tmp_path}: {os.strerror(number)}"
    for attempt in (
        lambda: take(tmp_path),
        lambda: run_folder.open_reports(tmp_path, parse([]).config, None),
    ):
        with pytest.raises(MegapipeError) as caught:
            attempt()
        assert (str(caught.value), caught.value.exit_code) == (told, code)


def test_a_run_that_was_there_before(tmp_path: Path) -> None:
    for name in run_folder.FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    take(tmp_path).release()


def test_what_a_killed_job_has_left_is_taken_over_and_removed(tmp_path: Path) -> None:
    """Two lines say so, which a log of the run has, and its folder is as that of any other."""
    killed = replace(heartbeat.Owner.this_process(), process=2**22 + 1)
    lock = tmp_path / ".lock.1"
    half = tmp_path / "checkpoints/.staging-00000002-x"
    for folder in (lock, half):
        folder.mkdir(parents=True)
    (lock / OWNER).write_text(json.dumps(asdict(killed)))
    (half / "00000-0000.safetensors").write_bytes(bytes(100))
    taken = take(tmp_path)
    assert taken.notes == [
        f"took over {tmp_path} from {killed}, which has ended",
        f"removed 1 unfinished checkpoint of killed jobs from {tmp_path / 'checkpoints'}",
    ]
    assert [*(tmp_path / "checkpoints").iterdir()] == []
    taken.release()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_link_leads_to_the_run_that_was_started_last(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("a", "b", "a"):
        take(runs / name).release()
        assert os.readlink(runs / "latest") == name, "a name beside it, so runs can be moved"
    assert sorted(path.name for path in runs.iterdir()) == ["a", "b", "latest"]
    (runs / "a").rmdir()
    take(runs / "b").release()
    assert os.readlink(runs / "latest") == "b", "a link to nothing is replaced"


def test_what_is_no_link_stays_where_the_link_would_be(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    take(tmp_path / "a").release()
    assert (tmp_path / "latest").is_dir()
    assert not (tmp_path / "latest").is_symlink()


def test_a_folder_of_runs_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=OSError(errno.EPERM, "no links")))
    take(tmp_path / "a").release()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_starts_that_no_later_one_goes_on_from_keep_their_records(tmp_path: Path) -> None:
    """Two are killed before they save; the third does save, and a fourth goes on from there."""
    for name, resumed_at in (("first", None), ("second", None), ("third", None), ("fourth", 3)):
        config = parse([f"run.name={name}"]).config
        observer = run_folder.open_reports(tmp_path, config, resumed_at)
        observer.note(f"says the {name}")
        observer.close()
    owners = {
        path.name: parse([str(path)]).config.run.name for path in tmp_path.glob("config*.yaml")
    }
    suffixes = {"first": "-step-00000000", "second": "-step-00000000.1", "third": ""}
    marks = {**suffixes, "fourth": "-step-00000003"}
    assert owners == {f"config{mark}.yaml": name for name, mark in marks.items()}
    for name, mark in suffixes.items():
        log = (tmp_path / f"log{mark}.jsonl").read_text().splitlines()
        said = [f"says the {name}", *(["says the fourth"] if name == "third" else [])]
        assert [json.loads(line)["text"] for line in log] == said
    records = {path.name for path in tmp_path.glob("provenance*.json")}
    assert records == {f"provenance{mark}.json" for mark in marks.values()}
