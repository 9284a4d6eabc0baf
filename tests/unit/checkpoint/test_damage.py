"""Whatever happens to the bytes of a checkpoint is noticed before a tensor is handed out."""

import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint import (
    Checkpoint,
    Piece,
    SingleProcess,
    find_newest,
    reader,
    save,
    shard,
    whole,
)
from megapipe.errors import CheckpointError
from tests.unit.checkpoint.checkpoint_worlds import (
    META,
    assert_holds,
    edit_manifest,
    flat_cut,
    run_world,
    save_alone,
    sealed,
    tensors,
)


@pytest.fixture
def path(tmp_path):
    """Write a checkpoint of two ranks with two shard files each."""

    def work(group):
        pieces = flat_cut(tensors(), group.rank, 2)
        return save(tmp_path, step=3, pieces=pieces, meta=META, group=group, shard_bytes=1000)

    return run_world(2, work)[0]


def read_all(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    for name in checkpoint.names():
        checkpoint.read(name)


def refused(path: Path) -> str:
    """Assert that reading and verifying fail with one line that names the checkpoint; return it."""
    with pytest.raises(CheckpointError) as info:
        read_all(path)
    assert "\n" not in str(info.value)
    assert str(path) in str(info.value)
    with pytest.raises(CheckpointError):
        Checkpoint.open(path).verify()
    return str(info.value)


FILES = ["manifest.json", "00000-0000.safetensors", "00001-0001.safetensors"]


@pytest.mark.parametrize("keep", ["0", "1", "half", "n-1"])
@pytest.mark.parametrize("file", FILES)
def test_truncation(path, file, keep):
    size = (path / file).stat().st_size
    os.truncate(path / file, {"0": 0, "1": 1, "half": size // 2, "n-1": size - 1}[keep])
    assert file in refused(path)
    assert find_newest(path.parent).path is None


@pytest.mark.parametrize("junk", [b"\n", b"\0" * 4096])
@pytest.mark.parametrize("file", FILES)
def test_appended_junk(path, file, junk):
    with open(path / file, "ab") as handle:
        handle.write(junk)
    assert file in refused(path)


@pytest.mark.full
def test_a_flipped_bit_anywhere_in_any_file(path):
    rng = random.Random(0)
    flipped = 0
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for at in range(rng.randrange(3), len(good), 3):
            bad = bytearray(good)
            bad[at] ^= 1 << rng.randrange(8)
            file.write_bytes(bad)
            with pytest.raises(CheckpointError, match=file.name):
                read_all(path)
            flipped += 1
        file.write_bytes(good)
    assert flipped > 1700
    assert_holds(path, 0)


def test_a_flipped_bit_is_found_without_reading_values(path):
    rng = random.Random(1)
    for file in path.glob("*.safetensors"):
        good = file.read_bytes()
        for at in rng.sample(range(len(good)), 40):
            bad = bytearray(good)
            bad[at] ^= 1 << rng.randrange(8)
            file.write_bytes(bad)
            checkpoint = Checkpoint.open(path)
            with pytest.raises(CheckpointError, match=f"{file.name} is damaged"):
                checkpoint.verify([file.name])
            checkpoint.verify(set(checkpoint.manifest.files) - {file.name})
        file.write_bytes(good)


@pytest.fixture
def threads(monkeypatch):
    """Have three threads read; tensors take several blocks, and files several runs."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(reader, "RUN_BYTES", 1)
    monkeypatch.setattr(shard, "_IN_CACHE", 64)


def test_threads_find_a_flipped_bit_wherever_it_is(path, threads):
    checkpoint = Checkpoint.open(path)
    assert max(len(list(checkpoint._runs(file))) for file in checkpoint.manifest.files) > 1
    checkpoint.verify()
    assert_holds(path, 0)
    for file in sorted(path.glob("*.safetensors")):
        good = file.read_bytes()
        for at in range(0, len(good), 37):
            bad = bytearray(good)
            bad[at] ^= 4
            file.write_bytes(bad)
            with pytest.raises(CheckpointError, match=f"{file.name} is damaged"):
                checkpoint.verify()
        file.write_bytes(good + b"x")
        with pytest.raises(CheckpointError, match=f"{file.name} has {len(good) + 1} bytes"):
            checkpoint.verify()
        file.write_bytes(good)
    checkpoint.verify()


def test_a_piece_is_checked_before_any_part_of_it_is_used(path):
    """The flipped byte lies outside the region that is read, yet inside a piece that it touches."""
    checkpoint = Checkpoint.open(path)
    name = "model/embedding.word.weight"
    piece = checkpoint.manifest.entries[name].pieces[0]
    bad = bytearray((path / piece.file).read_bytes())
    last_row = tensors()[name][piece.offsets[0] + piece.sizes[0] - 1]
    at = bytes(bad).index(last_row.numpy().tobytes()) + 3
    bad[at] ^= 1
    (path / piece.file).write_bytes(bad)
    first_row = piece.region._replace(sizes=(1, piece.sizes[1]))
    with pytest.raises(CheckpointError, match="do not match their checksum"):
        checkpoint.read(name, first_row)


def test_missing_and_extra_shards(path):
    extra = path / "00002-0000.safetensors"
    shutil.copy(path / FILES[1], extra)
    assert "00002-0000.safetensors is not in the manifest" in refused(path)
    extra.unlink()
    (path / FILES[2]).unlink()
    assert "No such file" in refused(path)


def test_swapped_shards(tmp_path):
    """Two shards of equal length that differ in nothing but names and numbers."""

    def work(group):
        name = f"m/{group.rank}"
        piece = Piece(name, (8,), whole((8,)), torch.full((8,), float(group.rank)))
        return save(tmp_path, step=3, pieces=[piece], meta=META, group=group)

    path = run_world(2, work)[0]
    a, b = path / "00000-0000.safetensors", path / "00001-0000.safetensors"
    assert a.stat().st_size == b.stat().st_size
    a.rename(path / "x")
    b.rename(a)
    (path / "x").rename(b)
    assert "its header is not what the manifest says" in refused(path)


@pytest.mark.parametrize("what", ["step", "attempt"])
def test_a_shard_of_another_save(tmp_path, what):
    """Same names, same lengths, another step or the same step trained again."""
    path = save_alone(tmp_path / "a", 3)
    other = save_alone(tmp_path / "b", 4 if what == "step" else 3, seed=1)
    shutil.copy(other / FILES[1], path / FILES[1])
    text = refused(path)
    assert ("header" if what == "step" else "checksum") in text


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "device"])
@pytest.mark.parametrize("file", FILES[:2])
def test_what_is_no_ordinary_file_is_not_opened(path, file, kind):
    real = path.parent / "elsewhere"
    (path / file).rename(real)
    if kind == "link":
        (path / file).symlink_to(real)
    elif kind == "fifo":
        os.mkfifo(path / file)
    elif kind == "folder":
        (path / file).mkdir()
    else:
        (path / file).symlink_to("/dev/zero")
    text = refused(path)
    expected = "is a symbolic link" if kind in ("link", "device") else "is not an ordinary file"
    assert expected in text


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


@pytest.mark.parametrize("with_torch", [False, True])
@pytest.mark.parametrize("file", [*FILES, "latest"])
def test_a_pickle_in_any_place_is_not_run(path, file, with_torch):
    canary, place = path.parent / "canary", path / file
    if file == "latest":
        place = path.parent / file
    size = place.stat().st_size
    if with_torch:
        torch.save(Payload(canary), place)
    else:
        place.write_bytes(pickle.dumps(Payload(canary)).ljust(size, b"\0"))
    if file == "latest":
        assert find_newest(path.parent).path == path
    else:
        refused(path)
    assert not canary.exists()


def first_piece(body):
    return next(entry["pieces"][0] for entry in body["entries"].values() if entry["pieces"])


def drop_piece(body):
    body["entries"]["model/embedding.word.weight"]["pieces"].pop()


def double_piece(body):
    pieces = body["entries"]["model/embedding.word.weight"]["pieces"]
    pieces.append(pieces[0])


def grow_entry(body):
    entry = body["entries"]["optimizer.step/count"]
    entry["shape"] = [2**40, 2**40]
    entry["pieces"][0] |= {"offsets": [0, 0], "sizes": [2**40, 2**40]}


def grow_file(body):
    next(iter(body["files"].values()))["bytes"] = 2**47


def setter(*keys_and_value):
    *keys, last, value = keys_and_value

    def edit(body):
        for key in keys:
            body = body[key]
        body[last] = value

    return edit


def on_piece(**change):
    return lambda body: first_piece(body).update(change)


BAD_NAMES = [
    "../00000-0000.safetensors",
    "/etc/passwd",
    "..",
    "",
    "00000-0000.safetensors/",
    "00000-0000.safetensors\n",
    "00000-0000.safetensors\0",
    "a/00000-0000.safetensors",
    "..\\00000-0000.safetensors",
    "00000-0000.SAFETENSORS",
    "\uff10\uff10\uff10\uff10\uff10-0000.safetensors",
    "\u0660\u0660\u0660\u0660\u0660-0000.safetensors",
    "CON",
    "x" * 5000,
    7,
    None,
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_file_name_leaves_the_folder(path, name):
    edit_manifest(path, on_piece(file=name))
    refused(path)
    if isinstance(name, str):
        edit_manifest(path, on_piece(file=FILES[1]))
        edit_manifest(path, lambda body: body["files"].update({name: body["files"][FILES[1]]}))
        refused(path)


HAND_MADE = {
    "hole": (drop_piece, "'model/embedding.word.weight' .* is in 0 pieces"),
    "overlap": (double_piece, "is in 2 pieces, not in one"),
    "huge entry": (grow_entry, "its pieces need"),
    "huge file": (grow_file, "its pieces need"),
    "huger": (on_piece(sizes=[2**60]), "less than"),
    "negative": (on_piece(offsets=[-1]), "greater than or equal to 0"),
    "empty piece": (on_piece(sizes=[0]), "greater than or equal to 1"),
    "other dims": (on_piece(offsets=[0] * 5, sizes=[1] * 5), "does not have the entry's"),
    "many dims": (on_piece(offsets=[0] * 7), "at most 6"),
    "checksum": (on_piece(xxh128="0" * 32), "do not match their checksum"),
    "checksum type": (on_piece(xxh128=0), "valid string"),
    "short checksum": (on_piece(xxh128="0" * 31), "should match pattern"),
    "float offset": (on_piece(offsets=[0.0]), "valid integer"),
    "text offset": (on_piece(offsets=["0"]), "valid integer"),
    "unlisted file": (on_piece(file="00009-0000.safetensors"), "is not listed"),
    "unused file": (
        lambda body: body["files"].update({"00009-0000.safetensors": body["files"][FILES[1]]}),
        "is not used",
    ),
    "unknown key": (setter("extra", 1), "Extra inputs"),
    "unknown piece key": (on_piece(extra=1), "Extra inputs"),
    "missing key": (lambda body: body.pop("step"), "step: Field required"),
    "version": (setter("version", 1), "version: 1, but this megapipe reads 2"),
    "format": (setter("format", "dcp"), "format: Input should be"),
    "step": (setter("step", -1), "step: "),
    "run id": (setter("run_id", "../x"), "run_id: "),
    "dtype": (setter("entries", "optimizer.step/count", "dtype", "fp16"), "dtype: "),
    "other dtype": (setter("entries", "optimizer.step/count", "dtype", "fp64"), "header is not"),
    "entry name": (lambda b: b["entries"].update({"a/../../b\n": 0}), "entries"),
    "digest": (setter("digests", {"corpus": "x"}), "digests"),
    "not an object": (setter("entries", []), "entries: "),
}


@pytest.mark.parametrize("case", HAND_MADE)
def test_hand_made_manifests(path, case):
    edit, message = HAND_MADE[case]
    edit_manifest(path, edit)
    with pytest.raises(CheckpointError, match=message):
        read_all(path)
    refused(path)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"step":1,"step":2}',
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 10_000,
        '"\\ud800"',
        "NaN",
    ],
)
def test_strange_json(path, body):
    (path / "manifest.json").write_bytes(sealed(body))
    refused(path)


def test_only_canonical_json_is_taken(path):
    """A key given twice would let two readers see two checkpoints."""
    body = json.loads((path / "manifest.json").read_bytes())["body"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    (path / "manifest.json").write_bytes(sealed(text))
    read_all(path)
    for variant in (text.replace('"step":3', '"step":2,"step":3'), json.dumps(body)):
        (path / "manifest.json").write_bytes(sealed(variant))
        assert "is not canonical JSON" in refused(path)


def test_infinity_in_a_manifest(path):
    body = json.loads((path / "manifest.json").read_bytes())["body"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    for number in ("NaN", "Infinity", "1e400"):
        changed = text.replace('"loss":2.0', f'"loss":{number}')
        assert changed != text
        (path / "manifest.json").write_bytes(sealed(changed))
        refused(path)


def test_a_huge_manifest_is_not_read(path):
    os.truncate(path / "manifest.json", 1 << 40)
    assert f"has {1 << 40} bytes, at most" in refused(path)


def test_newest_falls_back_over_the_damaged(tmp_path):
    paths = [save_alone(tmp_path, step, seed=step) for step in (1, 2, 3, 4)]
    os.truncate(paths[3] / FILES[1], 10)
    (paths[2] / "manifest.json").unlink()
    found = find_newest(tmp_path)
    assert found.path == paths[1]
    assert [str(paths[3]) in found.skipped[0], str(paths[2]) in found.skipped[1]] == [True, True]
    assert_holds(paths[1], 2)
    assert find_newest(tmp_path, skip=[paths[1]]).path == paths[0]
    assert find_newest(tmp_path, skip=paths) == (None, [])


def test_newest_goes_by_step_not_by_time_or_name(tmp_path):
    small = save_alone(tmp_path, 99_999_999)
    large = save_alone(tmp_path, 100_000_000)
    os.utime(large, (0, 0))
    os.utime(small, (4e9, 4e9))
    assert find_newest(tmp_path).path == large


def test_a_folder_under_another_step_is_passed_over(tmp_path):
    real = save_alone(tmp_path, 5)
    shutil.copytree(real, tmp_path / "step-00000900")
    found = find_newest(tmp_path)
    assert found.path == real
    assert found.skipped == [f"{tmp_path}/step-00000900 holds step 5"]
    assert_holds(tmp_path / "step-00000900", 0)


@pytest.mark.parametrize(
    "name",
    ["step-5", "step-000000010", "step-00000010.0", "step-00000010.01", "step-00000010\n", "step-"],
)
def test_names_of_another_form_do_not_count(tmp_path, name):
    real = save_alone(tmp_path, 5)
    shutil.copytree(real, tmp_path / name)
    (tmp_path / "step-00000011").symlink_to(real)
    (tmp_path / "step-00000012").write_text("a file")
    assert find_newest(tmp_path) == (real, [])


@pytest.mark.parametrize(
    "pointer", [b"", b"step-00000999\n", b"-1", b"\xff\0garbage", b"../../etc", None, "folder"]
)
def test_the_pointer_decides_nothing(tmp_path, pointer):
    save_alone(tmp_path, 5)
    newest = save_alone(tmp_path, 6)
    (tmp_path / "latest").unlink()
    if pointer == "folder":
        (tmp_path / "latest").mkdir()
    elif pointer is not None:
        (tmp_path / "latest").write_bytes(pointer)
    assert find_newest(tmp_path) == (newest, [])
    if pointer != "folder":
        assert find_newest(tmp_path).path == newest
        assert save_alone(tmp_path, 7).name + "\n" == (tmp_path / "latest").read_text()


def test_no_folder_has_no_newest(tmp_path):
    assert find_newest(tmp_path / "none") == (None, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot list .*file: Not a directory"):
        find_newest(tmp_path / "file")


def test_an_empty_checkpoint_is_legal(tmp_path):
    path = save(tmp_path, step=0, pieces=[], meta=META, group=SingleProcess())
    assert Checkpoint.open(path).names() == []
