"""The naive reader agrees with the package's, and it and its comparison notice what is wrong."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megapipe.checkpoint import Checkpoint, save
from megapipe.checkpoint.shard import TORCH_DTYPES
from tests.parity.naive_reader import Global, Malformed, in_type, read_global, read_manifest
from tests.parity.rank_state import Held, assert_held
from tests.unit.checkpoint.checkpoint_worlds import (
    META,
    ThreadGroup,
    dim_cut,
    flat_cut,
    run_world,
    save_alone,
    tensors,
)

DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@pytest.mark.parametrize("cut", [flat_cut, dim_cut(0), dim_cut(1)])
def test_both_readers_find_the_same(tmp_path: Path, cut: Callable[..., Any]) -> None:
    """Every type, NaN and -0 among the values, no dimension and no element among the shapes."""

    def work(group: ThreadGroup) -> Path:
        pieces = cut(tensors(), group.rank, group.world)
        return save(tmp_path, step=3, pieces=pieces, meta=META, group=group, shard_bytes=700)

    path = run_world(3, work)[0]
    found, state = read_global(path), tensors()
    assert found.keys() == state.keys() == set(Checkpoint.open(path).names())
    for name, tensor in state.items():
        assert found[name].dtype == DTYPES[tensor.dtype]
        assert found[name].bits.shape == tensor.shape
        assert found[name].bits.tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert read_manifest(path)["step"] == 3


def test_the_types_are_changed_as_torch_does_it() -> None:
    values = torch.cat([torch.randn(4096), torch.tensor([1.00390625, 1.01171875, -0.0, 3.38e38])])
    wide = Global("fp32", values.view(torch.int32).numpy().view(np.uint32))
    narrow = in_type(wide, "bf16")
    assert np.array_equal(narrow.bits.view(np.int16), values.bfloat16().view(torch.int16).numpy())
    again = values.bfloat16().float().view(torch.int32).numpy()
    assert np.array_equal(in_type(narrow, "fp32").bits.view(np.int32), again)
    with pytest.raises(ValueError, match="fp64 is not kept as bf16"):
        in_type(Global("fp64", wide.bits), "bf16")


Pieces = list[tuple[tuple[int, int], np.ndarray]]
WHOLE = np.arange(24, dtype=np.float32).reshape(4, 6)
QUARTERS: Pieces = [((i, j), WHOLE[i : i + 2, j : j + 3]) for i in (0, 2) for j in (0, 3)]


def write(folder: Path, pieces: Pieces) -> Path:
    """Write a consistent folder in which a [4, 6] tensor has these pieces, all in one file."""
    header, data, said = {}, b"", []
    for offsets, values in pieces:
        place = [len(data), len(data) + values.nbytes]
        key = f"model/a@{offsets[0]},{offsets[1]}"
        header[key] = {"dtype": "F32", "shape": values.shape, "data_offsets": place}
        said.append({"file": "f", "offsets": offsets, "sizes": values.shape, "xxh128": "0" * 32})
        data += values.tobytes()
    text = json.dumps(header).encode()
    (folder / "f").write_bytes(struct.pack("<Q", len(text)) + text + data)
    entry = {"dtype": "fp32", "shape": WHOLE.shape, "pieces": said}
    body = {"entries": {"model/a": entry}, "files": {"f": {}}}
    (folder / "manifest.json").write_text(json.dumps({"body": body}))
    return folder


def test_pieces_in_any_order_are_one_tensor(tmp_path: Path) -> None:
    found = read_global(write(tmp_path, QUARTERS[::-1]))
    assert np.array_equal(found["model/a"].bits.view(np.float32), WHOLE)


def test_two_swapped_rectangles_are_another_tensor(tmp_path: Path) -> None:
    (a, first), (b, second), *rest = QUARTERS
    found = read_global(write(tmp_path, [(a, second), (b, first), *rest]))
    assert not np.array_equal(found["model/a"].bits.view(np.float32), WHOLE)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (QUARTERS[:-1], r"element \[2, 3\] is written 0 times"),
        ([*QUARTERS, ((1, 1), WHOLE[1:2, 1:2])], r"element \[1, 1\] is written 2 times"),
        ([((0, 1), QUARTERS[0][1]), *QUARTERS[1:]], r"element \[0, 0\] is written 0 times"),
        ([*QUARTERS[:-1], ((2, 4), QUARTERS[-1][1])], r"model/a@2,4 leaves the shape \[4, 6\]"),
        ([((0, 0), WHOLE[:2]), *QUARTERS[1:]], r"element \[0, 3\] is written 2 times"),
    ],
)
def test_holes_and_overlaps(tmp_path: Path, pieces: Pieces, words: str) -> None:
    with pytest.raises(Malformed, match=words):
        read_global(write(tmp_path, pieces))


def test_a_manifest_and_a_shard_that_disagree(tmp_path: Path) -> None:
    write(tmp_path, QUARTERS)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    pieces = manifest["body"]["entries"]["model/a"]["pieces"]

    def read(words: str) -> None:
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(Malformed, match=words):
            read_global(tmp_path)

    pieces[0]["offsets"] = [0, 1]
    read("f has no model/a@0,1")
    pieces[0]["offsets"] = [0, 0]
    pieces[0]["sizes"] = [3, 2]
    read(r"model/a@0,0 is F32 \(2, 3\)")
    del pieces[0]
    read("element .0, 0. is written 0 times")
    manifest["body"]["entries"] = {}
    read("not in the manifest: .*f: model/a@0,0")


def test_a_shard_with_bytes_that_are_no_value(tmp_path: Path) -> None:
    path = save_alone(tmp_path, 1)
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes() + b"\0")
    with pytest.raises(Malformed, match="bytes of values, the header"):
        read_global(path)


def part(offsets: tuple[int, int], values: np.ndarray, start: int = 0, what: str = "own") -> Held:
    """Return a rank's values from `start` on, of [2, 8] rows with two columns of padding."""
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    return Held("model/a", "fp32", along(offsets), start, bits, what)


def along(offsets: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    first, second = offsets
    return tuple(range(first, first + 2)), tuple(range(second, second + 8))


PADDED = np.pad(WHOLE, ((0, 0), (0, 2)))
RIGHT = [
    [part((0, 0), PADDED[:2].ravel()[:5]), part((0, 0), PADDED[:2], what="weight")],
    [part((0, 0), PADDED[:2].ravel()[5:], 5), part((0, 0), PADDED[:2], what="weight")],
    [part((2, 0), PADDED[2:]), part((2, 0), PADDED[2:], what="weight")],
]


def faulty(rank: int, index: int, **changes: Any) -> list[list[Held]]:
    ranks = [list(parts) for parts in RIGHT]
    ranks[rank][index] = ranks[rank][index]._replace(**changes)
    return ranks


def changed(rank: int, index: int, change: Callable[[np.ndarray], object]) -> list[list[Held]]:
    bits = RIGHT[rank][index].bits.copy()
    change(bits)
    return faulty(rank, index, bits=bits)


def swap(bits: np.ndarray) -> None:
    """Swap two columns of the first row."""
    bits[:6] = bits[[3, 4, 5, 0, 1, 2]]


FOUND = {"model/a": Global("fp32", WHOLE.view(np.uint32))}


def test_what_ranks_hold() -> None:
    assert_held(RIGHT, FOUND)
    as_bf16 = in_type(FOUND["model/a"], "bf16")
    assert_held(RIGHT, {"model/a": as_bf16})  # these values need no more


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (changed(2, 0, swap), "own model/a on rank 2: 6 of 16 values differ, the first at 12"),
        (changed(1, 1, swap), "weight model/a on rank 1: 6 of 16"),
        (faulty(1, 0, start=4), "own model/a on rank 1"),
        (faulty(2, 0, along=along((1, 0))), "own model/a on rank 2"),
        (changed(0, 1, lambda bits: bits.__setitem__(3, 0x80000000)), "the first at 3: 0x80000000"),
        (changed(0, 1, lambda bits: bits.__setitem__(6, 1)), "the first at -1: 0x1, not 0x0"),
        (faulty(0, 0, bits=RIGHT[0][0].bits[:4]), r"elements are owned \[0, 1\] times"),
        ([*RIGHT, [RIGHT[0][0]]], r"elements are owned \[1, 2\] times"),
        ([*RIGHT[:2], RIGHT[2][:1]], "no stage has"),
        (faulty(0, 0, entry="model/b"), "model/b is held and was not saved"),
    ],
)
def test_what_ranks_do_not_hold(ranks: list[list[Held]], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        assert_held(ranks, FOUND)
