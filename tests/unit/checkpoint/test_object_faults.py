"""A store that fails, stays mute, or outlives its clients, at each request of a save or removal."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from megapipe.checkpoint import (
    Checkpoint,
    Piece,
    SingleProcess,
    clear_leftovers,
    find_newest,
    remove,
    save,
    whole,
)
from megapipe.checkpoint import object_storage as module
from megapipe.checkpoint.find import find_intact
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import MANIFEST, POINTER, REMOVED
from megapipe.checkpoint.object_storage import RemotePath
from megapipe.checkpoint.storage import StorageLocation, at, location_of
from megapipe.errors import CheckpointError, StorageError
from tests.parity.object_files import ObjectFileSystem
from tests.parity.object_server import Fault, ObjectServer, Request
from tests.unit.checkpoint.checkpoint_worlds import (
    META,
    ThreadGroup,
    flat_cut,
    run_world,
    save_alone,
    tensors,
)


def only_in_ci(value: str) -> Any:
    """Leave a value to full test runs, as other tests nearly prove it."""
    return pytest.param(value, marks=pytest.mark.full)


def slow(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def _in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the shard file of a save be uploaded in two parts."""
    monkeypatch.setattr(module, "PART_BYTES", 3000)


def requests_of(store: ObjectServer, work: Callable[[], object]) -> list[Request]:
    """Return the requests that `work` makes."""
    begun = len(store.requests)
    work()
    return store.requests[begun:]


def failing(store: ObjectServer, at: int, fault: Fault, *, lasting: bool) -> None:
    """Let the `at`-th request from now on fail, and with `lasting` all after it."""
    first = len(store.requests) + at

    def choose(number: int, request: Request) -> Fault | None:
        return fault if number == first or (lasting and number > first) else None

    store.fault = choose


def well(store: ObjectServer) -> None:
    store.fault = lambda number, request: None


def a_save(root: StorageLocation) -> StorageLocation:
    return save_alone(root, 2, seed=2)


def assert_intact(path: StorageLocation, seed: int) -> None:
    """Assert that the checkpoint is that of `tensors(seed)`, with few requests."""
    checkpoint = Checkpoint.open(path)
    checkpoint.verify()
    assert checkpoint.read("optimizer.step/count").item() == 2**40 + seed


def kinds_of_a_save(store: ObjectServer, root: StorageLocation) -> list[str]:
    """Return the kinds of requests of a save beside an older checkpoint."""
    save_alone(root, 1, seed=1)
    kinds = [r.kind for r in requests_of(store, lambda: a_save(root))]
    assert {"PUT", "PART", "JOIN", "LIST", "HEAD", "GET", "DELETE"} <= set(kinds)
    return kinds


@pytest.mark.parametrize("fault", ["drop", "short", only_in_ci("error"), slow("late")])
def test_a_failure_that_passes_is_got_over(
    store: ObjectServer, root: StorageLocation, fault: Fault
) -> None:
    """Any one request may fail: the save and all reads succeed, and nothing is left behind."""
    assert isinstance(root, RemotePath)
    kinds = kinds_of_a_save(store, root / "count")
    for number in range(len(kinds)):
        here = root / str(number)
        older = save_alone(here, 1, seed=1)
        failing(store, number, fault, lasting=False)
        path = a_save(here)
        well(store)
        assert_intact(path, 2)
        there = sorted([POINTER, older.name, path.name])
        assert at(here).names() == there, (number, kinds[number])
        assert len(at(path).names()) == len(Checkpoint.open(path).manifest.files) + 1
    for number in range(len(requests_of(store, lambda: assert_intact(path, 2)))):
        failing(store, number, fault, lasting=False)
        assert_intact(path, 2)


@pytest.mark.parametrize("fault", ["deny", slow("error"), slow("drop"), only_in_ci("late")])
def test_a_store_that_goes_away_in_a_save(
    store: ObjectServer, root: StorageLocation, fault: Fault
) -> None:
    """From any request on: one line says so, and older checkpoints and the pointer stay."""
    kinds = kinds_of_a_save(store, root / "count")
    manifest = len(kinds) - 4
    assert kinds[manifest:] == ["PUT", "HEAD", "GET", "PUT"]
    for number in range(len(kinds)):
        here = root / str(number)
        older = save_alone(here, 1, seed=1)
        failing(store, number, fault, lasting=True)
        with pytest.raises(CheckpointError) as caught:
            a_save(here)
        well(store)
        text = str(caught.value)
        assert text.startswith("checkpoint not saved: rank 0: cannot ")
        assert str(here) in text
        assert "\n" not in text
        if fault == "deny":
            assert "access is denied" in text
        # a manifest that was written, though its answer was lost, has made a checkpoint of it
        saved = number > manifest or (number == manifest and fault == "late")
        found = find_newest(here)
        assert found.skipped == []
        assert found.path is not None
        assert_intact(found.path, 2 if saved else 1)
        if number < len(kinds) - 1 or fault != "late":
            assert at(here / POINTER).read(99).decode() == f"{older.name}\n"
        clear_leftovers(here)
        assert [n for n in at(here).names() if n not in (POINTER, older.name)] == (
            [found.path.name] if saved else []
        )
        again = a_save(here)
        assert find_newest(here) == (again, [])


def test_a_failed_save_takes_its_objects_away(store: ObjectServer, root: StorageLocation) -> None:
    older = save_alone(root, 1, seed=1)
    kinds = kinds_of_a_save(store, root / "count")
    for number in range(len(kinds)):
        failing(store, number, "deny", lasting=False)
        with pytest.raises(CheckpointError):
            a_save(root)
        well(store)
        assert at(root).names() == sorted([POINTER, "count", older.name]), kinds[number]


def test_a_failure_of_one_rank_is_that_of_all(store: ObjectServer, root: StorageLocation) -> None:
    older = save_alone(root, 1, seed=1)

    def fault(number: int, request: Request) -> Fault | None:
        return "error" if "/00001-0000" in request.key else None

    store.fault = fault

    def work(group: ThreadGroup) -> StorageLocation:
        pieces = flat_cut(tensors(2), group.rank, 3)
        return save(root, step=2, pieces=pieces, meta=META, group=group)

    for result in run_world(3, work):
        assert isinstance(result, CheckpointError)
        assert "checkpoint not saved: rank 1: cannot write" in str(result)
        assert "the server answers 503" in str(result)
    assert find_newest(root) == (older, [])
    tries = {r.key for r in store.requests if "/00001-0000" in r.key}
    sent = [r for r in store.requests if "/00001-0000" in r.key and r.kind == "PUT"]
    assert (len(tries), len(sent)) == (1, 6)
    assert "(6 tries in 1" in str(result)
    assert at(root).names() == sorted([POINTER, older.name])


def test_a_mute_store_is_not_waited_for(store: ObjectServer, root: StorageLocation) -> None:
    """A save waits for half of its patience, and a quarter of that for cleaning up. Mute are the
    first and the last request of a save, an upload, or the manifest."""
    save_alone(root, 1, seed=1)
    hasty = location_of(str(root), what="URL", patience_s=0.4)
    kinds = kinds_of_a_save(store, root / "count")
    for number in (0, kinds.index("PART"), len(kinds) - 4, len(kinds) - 1):
        failing(store, number, "mute", lasting=True)
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=r"cannot .*: no answer in 0.2 s"):
            a_save(hasty)
        assert 0.2 <= time.monotonic() - began < 60
        well(store)
        assert find_newest(root).path is not None
    failing(store, 0, "mute", lasting=True)
    with pytest.raises(CheckpointError, match=r"cannot list .*: no answer in 0.2 s"):
        find_newest(hasty)


def test_missing_buckets_and_denials_are_found_at_the_start(store: ObjectServer) -> None:
    none = location_of(store.url("run").replace("/bucket/", "/none/"), what="URL")
    assert isinstance(none, RemotePath)
    words = r"cannot write .*/none/run/.*: there is no such object or bucket \(NoSuchBucket\)"
    with pytest.raises(CheckpointError, match=words):
        none.probe()
    failing(store, 0, "deny", lasting=True)
    there = location_of(store.url("run"), what="URL")
    assert isinstance(there, RemotePath)
    with pytest.raises(CheckpointError, match=r"cannot write .*: access is denied \(Forbidden\)"):
        there.probe()


def test_an_error_is_no_absence(store: ObjectServer, root: StorageLocation) -> None:
    """A manifest that cannot be read does not make its checkpoint a leftover."""
    path = save_alone(root, 1, seed=1)

    def fault(number: int, request: Request) -> Fault | None:
        return "error" if request.kind == "HEAD" else None

    store.fault = fault
    told = r"cannot look for .*manifest\.json: the server"
    for look in (find_newest, committed):
        with pytest.raises(CheckpointError, match=told):
            look(root)
    removed, (problem,) = clear_leftovers(root)
    assert not removed
    assert re.search(told, problem)
    well(store)
    assert_intact(path, 1)


@pytest.mark.parametrize("fault", ["short", "error", "deny"])
def test_what_cannot_be_read_is_not_damaged(
    store: ObjectServer, root: StorageLocation, fault: Fault
) -> None:
    """Neither the newest checkpoint, by its manifest or by a shard, nor an older one is taken."""
    for step in (1, 2):
        path = save_alone(root, step, seed=step)
    for name in (MANIFEST, ".safetensors"):
        ending = name

        def failing_read(number: int, request: Request, ending: str = ending) -> Fault | None:
            return fault if request.kind == "GET" and request.key.endswith(ending) else None

        store.fault = failing_read
        with pytest.raises(StorageError, match=f"cannot read {path}/.*{re.escape(name)}: "):
            find_intact(root)
    well(store)
    assert find_intact(root) == (path, [])


def test_a_bug_is_not_repeated(store: ObjectServer, root: StorageLocation) -> None:
    calls = []

    def pieces() -> Iterator[Piece]:
        calls.append(1)
        yield Piece("m/x", (4,), whole((4,)), torch.ones(4))
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        save(root, step=1, pieces=pieces(), meta=META, group=SingleProcess())
    assert calls == [1]
    assert at(root).names() == []


class Killed(BaseException):
    """An error in place of SIGKILL: no handler for ordinary errors sees it."""


@contextmanager
def killing(number: int, when: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Die before or after the `number`-th request; the dead make none."""
    real, made = ObjectFileSystem._request, []

    def request(self: Any, *args: Any, **given: Any) -> Any:
        made.append(1)
        if len(made) - 1 > number:
            return b"", {}
        if len(made) - 1 < number:
            return real(self, *args, **given)
        if when == "after":
            with suppress(FileNotFoundError):  # an answer as any other
                real(self, *args, **given)
        raise Killed

    with patch.context() as inner:
        inner.setattr(ObjectFileSystem, "_request", request)
        yield


@pytest.mark.parametrize("when", [only_in_ci("before"), "after"])
def test_a_kill_at_each_request_of_a_save(
    store: ObjectServer, root: StorageLocation, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = kinds_of_a_save(store, root / "count")
    manifest = len(kinds) - 4
    for number in range(len(kinds)):
        here = root / str(number)
        older = save_alone(here, 1, seed=1)
        with killing(number, when, monkeypatch), pytest.raises(Killed):
            a_save(here)
        saved = number > manifest or (number == manifest and when == "after")
        found = find_newest(here)
        assert found.skipped == []
        assert found.path is not None
        assert (found.path != older) == saved, (number, kinds[number])
        assert_intact(found.path, 2 if saved else 1)
        clear_leftovers(here)
        assert at(here).names() == sorted({POINTER, older.name, found.path.name})
        again = save_alone(here, 2, seed=3)
        assert find_newest(here) == (again, [])
        assert_intact(again, 3)


@pytest.mark.parametrize("when", [slow("before"), only_in_ci("after")])
def test_a_kill_at_each_request_of_a_removal(
    store: ObjectServer, root: StorageLocation, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is whole, and the next removal finishes this one."""

    def fill(here: StorageLocation) -> list[StorageLocation]:
        return [save_alone(here, step, seed=step) for step in (1, 2, 3)]

    paths = fill(root / "count")
    requests = requests_of(store, lambda: remove(root / "count", paths[:2]))
    assert [r.key.endswith(MANIFEST) for r in requests if r.kind == "DELETE"].count(True) == 2
    for number in range(len(requests)):
        here = root / str(number)
        paths = fill(here)
        with killing(number, when, monkeypatch), pytest.raises(Killed):
            remove(here, paths[:2])
        for key in committed(here):
            assert_intact(here / key.name, key.step)
        assert find_newest(here) == (paths[2], [])
        remove(here, [here / key.name for key in committed(here)[1:]])
        assert at(here).names() == sorted([POINTER, REMOVED, paths[2].name])
        assert save_alone(here, 2).name.startswith("step-00000002.1-"), "a name is given once"


def test_what_cannot_be_removed_is_told_and_the_rest_goes(
    store: ObjectServer, root: StorageLocation
) -> None:
    paths = [save_alone(root, step, seed=step) for step in (1, 2, 3)]

    def fault(number: int, request: Request) -> Fault | None:
        return "deny" if request.kind == "DELETE" and paths[0].name in request.key else None

    store.fault = fault
    done = remove(root, paths[:2])
    assert done.removed == [paths[1]]
    (problem,) = done.problems
    assert problem.startswith(f"cannot remove {paths[0]}/{MANIFEST}: access is denied")
    assert find_newest(root) == (paths[2], [])
    assert_intact(paths[0], 1)
