"""Checkpoints on object storage: the same bytes, the same checks, the manifest last."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.distributed import HashStore

from megapipe.checkpoint import (
    Checkpoint,
    Region,
    clear_leftovers,
    find_newest,
    remove,
    save,
    shard,
    whole,
)
from megapipe.checkpoint import object_storage as module
from megapipe.checkpoint.async_save import AsyncSaver
from megapipe.checkpoint.find import find_checkpoint, latest_run
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import FAILED_PREFIX, MANIFEST, POINTER, REMOVED, CheckpointName
from megapipe.checkpoint.object_storage import RemotePath
from megapipe.checkpoint.storage import StorageLocation, at, location_of
from megapipe.errors import CheckpointError, ConfigError
from tests.parity.object_server import BUCKET, ObjectServer
from tests.parity.tiers import in_parts
from tests.unit.checkpoint.checkpoint_worlds import (
    META,
    ThreadGroup,
    assert_holds,
    flat_cut,
    run_world,
    same_bits,
    save_alone,
    tensors,
)

SHARD = ".safetensors"


def content(place: StorageLocation) -> dict[str, bytes]:
    """Return all files of a checkpoint by name."""
    return {name: at(place / name).read(1 << 20) for name in at(place).names()}


@pytest.mark.parametrize("part_bytes", [500, 1 << 25])
@pytest.mark.parametrize("world", [1, 3])
def test_it_has_the_very_bytes_of_a_local_one(
    tmp_path: Path,
    root: StorageLocation,
    world: int,
    part_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each object takes one request, or is uploaded in parts."""
    monkeypatch.setattr(module, "PART_BYTES", part_bytes)

    def work(group: ThreadGroup) -> list[StorageLocation]:
        return [
            save(
                where,
                step=3,
                pieces=flat_cut(tensors(), group.rank, world),
                meta=META,
                group=group,
                shard_bytes=1200,
            )
            for where in (tmp_path, root)
        ]

    (local, remote), *others = run_world(world, work)
    assert all(other == [local, remote] for other in others)
    assert content(remote) == content(local)
    assert len(content(remote)) > world
    assert_holds(remote, 0)
    assert find_newest(root) == (remote, [])
    assert at(root / POINTER).read(99) == f"{remote.name}\n".encode()
    key = CheckpointName.parsed(remote.name)
    assert key is not None
    assert (key.plain, len(key.suffix)) == (local.name, 16)


def test_it_is_streamed(
    root: StorageLocation, store: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request has more bytes than a part and a block of a tensor, whatever a shard has."""
    monkeypatch.setattr(module, "PART_BYTES", 1000)
    monkeypatch.setattr("megapipe.checkpoint.shard._BLOCK", 400)
    path = save_alone(root, 1)
    size = Checkpoint.open(path).manifest.files[f"00000-0000{SHARD}"].bytes
    sent = [r.nbytes for r in store.requests if r.key.endswith(SHARD) and r.nbytes]
    assert sum(sent) == size
    assert max(sent) < 1400
    assert size > 3000
    assert not store.parts


def test_the_manifest_comes_last_and_then_the_pointer(
    root: StorageLocation, store: ObjectServer
) -> None:
    def work(group: ThreadGroup) -> StorageLocation:
        pieces = flat_cut(tensors(), group.rank, 2)
        return save(root, step=3, pieces=pieces, meta=META, group=group, shard_bytes=1200)

    path = run_world(2, work)[0]
    written = [r.key.rpartition("/")[2] for r in store.requests if r.kind == "PUT"]
    assert written[-2:] == [MANIFEST, POINTER]
    assert sorted(written[:-2]) == sorted(
        [*Checkpoint.open(path).manifest.files, "receipt-00000.json", "receipt-00001.json"]
    )
    kinds = [(r.kind, r.key.rpartition("/")[2]) for r in store.requests]
    checked = kinds.index(("LIST", path.name))
    assert kinds.index(("PUT", MANIFEST)) > checked, "sizes are looked at before"
    assert kinds.index(("GET", MANIFEST)) < kinds.index(("PUT", POINTER)), "it is read again"


def test_a_region_is_read_and_no_more(
    root: StorageLocation, store: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(group: ThreadGroup) -> StorageLocation:
        pieces = flat_cut(tensors(), group.rank, 3)
        return save(root, step=3, pieces=pieces, meta=META, group=group, shard_bytes=1000)

    checkpoint = Checkpoint.open(run_world(3, work)[0])
    name = "model/embedding.word.weight"
    pieces = checkpoint.manifest.entries[name].pieces
    assert len(pieces) > 1
    piece = pieces[1]
    begun = len(store.requests)
    read = checkpoint.read(name, piece.region)
    assert same_bits(read, tensors()[name][piece.region.inside(whole_of(name))])
    kinds = [(r.kind, r.nbytes) for r in store.requests[begun:]]
    assert kinds == [("GET", len(checkpoint._header(piece.file))), ("GET", read.nbytes)]
    monkeypatch.setattr(shard, "_IN_CACHE", 64)
    begun = len(store.requests)
    assert same_bits(checkpoint.read(name, piece.region), read)
    assert [r.nbytes for r in store.requests[begun:]] == [read.nbytes], "however it is looked at"
    begun = len(store.requests)
    checkpoint.verify()
    asked = [r.kind for r in store.requests[begun:]]
    assert asked == ["LIST"] + ["GET"] * 2 * len(checkpoint.manifest.files), "headers, tensors"


def whole_of(name: str) -> Region:
    return whole(tuple(tensors()[name].shape))


def change(store: ObjectServer, path: StorageLocation, file: str, data: bytes | None) -> None:
    key = f"{BUCKET}/run/{path.name}/{file}"
    if data is None:
        del store.objects[key]
    else:
        store.put(key, data)


DAMAGES = {
    "flipped": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "cut": lambda data: data[:-9],
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "gone": lambda data: None,
    "another": lambda data: bytes(len(data)),
}


def read_all(path: StorageLocation) -> None:
    checkpoint = Checkpoint.open(path)
    for name in checkpoint.names():
        checkpoint.read(name)


@pytest.mark.parametrize("file", [MANIFEST, f"00000-0001{SHARD}"])
@in_parts("damage", DAMAGES, default=3, full=1)
def test_damage_is_refused_by_name_and_the_older_one_taken(
    root: StorageLocation, store: ObjectServer, damage: str, file: str
) -> None:
    older = save_alone(root, 1, seed=1)
    path = save_alone(root, 2, seed=2, shard_bytes=1200)
    change(store, path, file, DAMAGES[damage](content(path)[file]))
    with pytest.raises(CheckpointError) as caught:
        read_all(path)
    assert f"{path}/{file}" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError):
        Checkpoint.open(path).verify()
    found = find_newest(root)
    if damage in ("flipped", "another") and file != MANIFEST:  # lengths do not tell
        assert found.path == path
        found = find_newest(root, skip=[path])
    elif not (damage == "gone" and file == MANIFEST):  # without one it is no checkpoint at all
        assert len(found.skipped) == 1
    assert found.path == older
    assert_holds(older, 1)


def test_what_is_not_in_the_manifest_is_refused(root: StorageLocation, store: ObjectServer) -> None:
    path = save_alone(root, 2)
    change(store, path, f"00001-0000{SHARD}", b"x")
    with pytest.raises(CheckpointError, match=rf"{path}/00001-0000.*is not in the manifest"):
        Checkpoint.open(path)


def test_a_piece_is_checked_before_any_of_it_is_used(
    root: StorageLocation, store: ObjectServer
) -> None:
    path = save_alone(root, 2)
    checkpoint = Checkpoint.open(path)
    name, file = "model/embedding.word.weight", f"00000-0000{SHARD}"
    bad = bytearray(content(path)[file])
    bad[bytes(bad).index(tensors()[name][-1].numpy().tobytes()) + 3] ^= 1
    change(store, path, file, bytes(bad))
    first = whole_of(name)._replace(sizes=(1, 12))
    with pytest.raises(CheckpointError, match="do not match their checksum"):
        checkpoint.read(name, first)


def test_a_store_and_a_disk_exchange_checkpoints(
    tmp_path: Path, root: StorageLocation, store: ObjectServer
) -> None:
    """Copied object by object, by whatever tool."""
    local = save_alone(tmp_path, 1, seed=1)
    for name, data in content(local).items():
        change(store, local, name, data)
    assert_holds(root / local.name, 1)
    assert find_newest(root).path == root / local.name
    remote = save_alone(root, 2, seed=2)
    os.mkdir(tmp_path / remote.name)
    for name, data in content(remote).items():
        (tmp_path / remote.name / name).write_bytes(data)
    assert find_newest(tmp_path) == (tmp_path / remote.name, [])
    assert_holds(tmp_path / remote.name, 2)


def test_a_step_saved_again_is_a_later_checkpoint(root: StorageLocation) -> None:
    paths = [save_alone(root, 5, seed=seed) for seed in (1, 2, 3)]
    keys = committed(root)
    assert [key.name for key in keys] == [path.name for path in reversed(paths)]
    assert [(key.step, key.attempt) for key in keys] == [(5, 2), (5, 1), (5, 0)]
    assert find_newest(root).path == paths[2]
    for seed, path in enumerate(paths, 1):
        assert_holds(path, seed)


def test_leftovers_are_those_of_attempts_alone(root: StorageLocation, store: ObjectServer) -> None:
    """What somebody copies there is none, nor is what belongs to another run."""
    path = save_alone(root, 1)
    stays = [f"step-00000009/00000-0000{SHARD}", "notes.txt", "step-00000008-backup/x"]
    stays += [f"step-00000007-{'0' * 15}/x", "other/step-1"]
    goes = [f"step-00000002-{'a' * 16}/00000-0000{SHARD}", f"step-00000002.1-{'b' * 16}/receipt"]
    goes += [".staging-probe-1"]
    for key in (*stays, *goes):
        store.put(f"{BUCKET}/run/{key}", b"x")
    assert find_newest(root) == (path, [])
    done = clear_leftovers(root)
    assert done.problems == []
    assert len(done.removed) == 3
    own = [f"{path.name}/{name}" for name in content(path)]
    assert store.keys("run") == sorted([*stays, *own, POINTER])
    assert clear_leftovers(root / "nothing") == ([], [])


def test_late_objects_of_a_job_that_was_taken_for_dead_harm_nobody(
    root: StorageLocation, store: ObjectServer
) -> None:
    """It goes on writing, up to its manifest, after another has cleared up and saved."""
    other = save_alone(root, 4, seed=1)
    late = {key: data for key, data in store.objects.items() if other.name in key}
    for key in late:
        del store.objects[key]
    path = save_alone(root, 4, seed=2)
    for key, data in late.items():
        store.put(key, data)
        assert_holds(path, 2)
    assert {found.name for found in committed(root)} == {path.name, other.name}


def test_removal_takes_the_manifest_first(root: StorageLocation, store: ObjectServer) -> None:
    paths = [save_alone(root, step, seed=step, shard_bytes=1200) for step in (1, 2, 3)]
    mark = f"{FAILED_PREFIX}{paths[0].name}"
    at(root / mark).replace(b"")
    begun = len(store.requests)
    done = remove(root, [paths[1], paths[0]])
    assert done == ([paths[1], paths[0]], [])
    gone = [r.key for r in store.requests[begun:] if r.kind == "DELETE"]
    assert gone[0] == f"run/{paths[1].name}/{MANIFEST}"
    assert f"run/{mark}" in gone
    assert len(gone) == len(set(gone)) == 13
    assert find_newest(root) == (paths[2], [])
    assert store.keys("run") == sorted(
        [*(f"{paths[2].name}/{n}" for n in content(paths[2])), POINTER, REMOVED]
    )


def test_saves_in_the_background(tmp_path: Path, root: StorageLocation) -> None:
    counter = HashStore()

    def work(group: ThreadGroup) -> StorageLocation:
        background = AsyncSaver(group, counter, shard_bytes=1200)
        own = flat_cut(tensors(2), group.rank, 3)
        background.begin(root, step=2, pieces=own, meta=META, is_ours=lambda: None, nbytes=10**18)
        return background.finish()

    paths = run_world(3, work)
    assert len(set(paths)) == 1
    assert_holds(paths[0], 2)


def test_names_that_people_have(root: StorageLocation, store: ObjectServer) -> None:
    paths = [save_alone(root, step, seed=step) for step in (1, 2)]
    assert find_checkpoint(paths[0]).step == 1
    assert find_checkpoint(root).step == 2
    change(
        store, paths[1], f"00000-0000{SHARD}", bytes(len(content(paths[1])[f"00000-0000{SHARD}"]))
    )
    assert find_checkpoint(root).step == 1
    runs = location_of(store.url(""), what="URL")
    assert isinstance(runs, RemotePath)
    other = save_alone(runs / "other", 1)
    newest = f"{BUCKET}/other/{other.name}/{MANIFEST}"
    store.written[newest] += 100
    assert latest_run(runs) == runs / "other"
    store.written[newest] -= 200
    assert latest_run(runs) == root
    assert latest_run(runs / "none") is None
    with pytest.raises(CheckpointError, match=r"none is neither a checkpoint nor a run folder"):
        find_checkpoint(runs / "none")


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("s3://bucket/x", CheckpointError, r"URL=s3://bucket/x: Install s3fs to access S3"),
        ("nothing://x/y", CheckpointError, r"URL=nothing://x/y: Protocol not known: nothing"),
        ("objects://me:secret@host/x", ConfigError, "URL is a URL with a user name or password"),
        ("objects:///", ConfigError, "expected a protocol and a path, as in s3://bucket/path"),
        ("objects://host/a*b", ConfigError, "expected a protocol and a path, as in s3://bucket"),
        ("simplecache::objects://host/a", ConfigError, "expected a protocol and a path"),
        ("file:///tmp/x", ConfigError, "expected a path, not a URL, for a local folder"),
    ],
)
def test_urls_that_cannot_be_used_are_a_line(
    store: ObjectServer, url: str, kind: type[Exception], words: str
) -> None:
    if url.startswith("s3") and find_spec("s3fs") is not None:
        pytest.skip("s3fs is installed")
    with pytest.raises(kind) as caught:
        location_of(url, what="URL")
    assert re.search(words, str(caught.value))
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not store.requests


def test_places_are_like_paths(root: StorageLocation) -> None:
    assert isinstance(root, RemotePath)
    a, b = root / "a", root / "b"
    assert sorted([b, a]) == [a, b]
    assert len({a, root / "a", b}) == 2
    assert (a / "x").parent == a
    assert (a.name, str(a)) == ("a", f"{root}/a")
    assert location_of(f"{root}/", what="URL") == root
    assert location_of("memory://x/y", what="URL") / "z" == location_of(
        "memory://x/y/z", what="URL"
    )


def test_the_memory_of_a_process() -> None:
    """A file system of fsspec's own."""
    root = location_of("memory://checkpoints/run", what="URL")
    assert isinstance(root, RemotePath)
    root.probe()
    paths = [save_alone(root, step, seed=step, shard_bytes=1200) for step in (1, 2, 3)]
    assert find_newest(root) == (paths[2], [])
    assert_holds(paths[2], 3)
    assert remove(root, paths[:2]) == (paths[:2], [])
    assert at(root).names() == sorted([POINTER, REMOVED, paths[2].name])
    at(root).remove()
    assert find_newest(root) == (None, [])
