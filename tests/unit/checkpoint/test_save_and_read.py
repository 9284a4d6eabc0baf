import errno
import os
import re
import resource
import threading

import pytest
import torch
from safetensors import safe_open

from megapipe.checkpoint import (
    Checkpoint,
    Meta,
    Piece,
    Region,
    SingleProcess,
    find_newest,
    save,
    whole,
)
from megapipe.errors import CheckpointError
from tests.unit.checkpoint.checkpoint_worlds import (
    META,
    assert_holds,
    dim_cut,
    flat_cut,
    run_world,
    same_bits,
    save_alone,
    tensors,
)

LAYOUTS = {
    "one": (flat_cut, 1),
    "zero3": (flat_cut, 3),
    "zero8": (flat_cut, 8),
    "rows4": (dim_cut(0), 4),
    "columns5": (dim_cut(1), 5),
}


def save_as(root, layout, *, step=100, seed=0, **options):
    cut, world = LAYOUTS[layout]

    def work(group):
        pieces = cut(tensors(seed), group.rank, world)
        return save(root, step=step, pieces=pieces, meta=META, group=group, **options)

    return run_world(world, work)


@pytest.mark.parametrize("reading", LAYOUTS)
@pytest.mark.parametrize("writing", LAYOUTS)
def test_any_layout_reads_what_any_other_wrote(tmp_path, writing, reading):
    paths = save_as(tmp_path, writing, shard_bytes=700)
    assert paths == [tmp_path / "step-00000100"] * LAYOUTS[writing][1]
    cut, world = LAYOUTS[reading]
    checkpoint = Checkpoint.open(paths[0])
    assert checkpoint.step == 100
    assert checkpoint.names() == sorted(tensors())
    touched = 0
    for rank in range(world):
        for piece in cut(tensors(), rank, world):
            assert same_bits(checkpoint.read(piece.name, piece.region), piece.tensor)
            touched += piece.region.numel
    assert touched == sum(t.numel() for t in tensors().values())
    assert_holds(paths[0], seed=0)


def test_shards_are_bounded_and_plain_safetensors(tmp_path):
    (path,) = save_as(tmp_path, "one", shard_bytes=1200)
    shards = sorted(path.glob("*.safetensors"))
    assert [shard.name for shard in shards] == [f"00000-{i:04d}.safetensors" for i in range(5)]
    found = {}
    for shard in shards:
        with safe_open(shard, "pt") as file:
            assert file.metadata() == {"format": "pt", "run_id": "a-run", "step": "100"}
            tensors_here = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        assert len(tensors_here) == 1 or sum(t.nbytes for t in tensors_here.values()) <= 1200
        found |= tensors_here
    for name, tensor in tensors().items():
        if tensor.numel():
            key = f"{name}@{','.join('0' * tensor.dim())}"
            assert same_bits(found.pop(key), tensor)
    assert not found
    assert {file.name for file in path.iterdir()} == {"manifest.json", *(s.name for s in shards)}


def test_tensors_of_mixed_widths_are_aligned_in_the_file(tmp_path):
    pieces = [
        Piece("m/a", (3,), Region((0,), (3,)), torch.ones(3).bfloat16()),
        Piece("m/b", (1,), Region((0,), (1,)), torch.ones(1, dtype=torch.float64)),
        Piece("m/c", (1,), Region((0,), (1,)), torch.ones(1)),
    ]
    path = save(tmp_path, step=1, pieces=pieces, meta=META, group=SingleProcess())
    with open(path / "00000-0000.safetensors", "rb") as file:
        assert int.from_bytes(file.read(8), "little") % 8 == 0
    with safe_open(path / "00000-0000.safetensors", "pt") as file:
        starts = {key: file.get_tensor(key).data_ptr() for key in file.keys()}  # noqa: SIM118
    assert starts["m/b@0"] < starts["m/c@0"] < starts["m/a@0"]


def test_meta_comes_back_exactly(tmp_path):
    manifest = Checkpoint.open(save_alone(tmp_path, 7)).manifest
    assert (manifest.run_id, manifest.step) == ("a-run", 7)
    for field in ("layout", "coordinates", "config", "digests"):
        assert getattr(manifest, field) == getattr(META, field)
    assert isinstance(manifest.coordinates["loss"], float)
    assert manifest.config["y"] is True


def test_equal_content_makes_equal_bytes(tmp_path):
    a, b = save_alone(tmp_path / "a", 7), save_alone(tmp_path / "b", 7)
    for file in a.iterdir():
        assert file.read_bytes() == (b / file.name).read_bytes()


def test_strided_and_gradient_tensors_are_saved(tmp_path):
    tensor = torch.randn(6, 4, requires_grad=True).t()
    piece = Piece("m/t", (4, 6), whole((4, 6)), tensor)
    path = save(tmp_path, step=1, pieces=[piece], meta=META, group=SingleProcess())
    assert torch.equal(Checkpoint.open(path).read("m/t"), tensor)


def test_the_same_step_twice_keeps_both(tmp_path):
    paths = [save_alone(tmp_path, 5, seed) for seed in range(3)]
    assert [p.name for p in paths] == ["step-00000005", "step-00000005.1", "step-00000005.2"]
    for seed, path in enumerate(paths):
        assert_holds(path, seed)
    assert find_newest(tmp_path) == (paths[2], [])
    assert (tmp_path / "latest").read_text() == "step-00000005.2\n"


def test_reads_widen_but_never_round(tmp_path):
    checkpoint = Checkpoint.open(save_alone(tmp_path, 1))
    name = "model/layers.0.mlp.up.weight"
    wide = checkpoint.read(name, dtype=torch.float64)
    assert same_bits(wide, tensors()[name].double())
    for name, dtype in [
        ("model/final_norm.weight", torch.float32),
        ("model/embedding.word.weight", torch.bfloat16),
        ("optimizer.step/count", torch.float64),
    ]:
        with pytest.raises(CheckpointError, match="cannot be read as"):
            checkpoint.read(name, dtype=dtype)


@pytest.mark.parametrize(
    "region",
    [
        Region((0, 0), (25, 12)),
        Region((20, 0), (5, 12)),
        Region((-1, 0), (2, 12)),
        Region((0,), (12,)),
        Region((25, 0), (0, 12)),
    ],
)
def test_a_region_outside_is_refused(tmp_path, region):
    checkpoint = Checkpoint.open(save_alone(tmp_path, 1))
    with pytest.raises(CheckpointError, match=r"has shape \[24, 12\], not Region"):
        checkpoint.read("model/embedding.word.weight", region)


def test_an_unknown_entry_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no entry 'model/head\.weight'"):
        Checkpoint.open(save_alone(tmp_path, 1)).read("model/head.weight")


def test_match_names_the_first_difference(tmp_path):
    checkpoint = Checkpoint.open(save_alone(tmp_path, 1))
    shapes = {n: tuple(t.shape) for n, t in tensors().items() if n.startswith("model/")}
    checkpoint.match(shapes)
    with pytest.raises(CheckpointError, match=r"lacks the entry 'model/head\.weight'"):
        checkpoint.match({**shapes, "model/head.weight": (24, 12)})
    del shapes["model/final_norm.weight"]
    with pytest.raises(CheckpointError, match=r"unexpected entry 'model/final_norm\.weight'"):
        checkpoint.match(shapes)
    shapes["model/final_norm.weight"] = (13,)
    with pytest.raises(CheckpointError, match=r"has shape \[12\], the model's has \[13\]"):
        checkpoint.match(shapes)


def one_line(error):
    assert isinstance(error, CheckpointError), repr(error)
    assert "\n" not in str(error)
    return str(error)


def failing_save(root, per_rank, step=2):
    """Save with hand-made pieces per rank; every rank must fail with the same line."""
    world = len(per_rank)

    def work(group):
        return save(root, step=step, pieces=per_rank[group.rank], meta=META, group=group)

    texts = [one_line(result) for result in run_world(world, work)]
    assert len(set(texts)) == 1
    assert not [p for p in root.iterdir() if p.name.startswith(".staging")]
    return texts[0]


def row(begin, end, *, name="m/w", rows=4, dtype=torch.float32):
    region = Region((begin, 0), (end - begin, 3))
    return Piece(name, (rows, 3), region, torch.ones(region.sizes, dtype=dtype))


@pytest.mark.parametrize(
    ("per_rank", "message"),
    [
        ([[row(0, 2)], [row(3, 4)]], r"shape \[4, 3\]: element \[2, 0\] is in 0 pieces"),
        ([[row(0, 3)], [row(2, 4)]], r"element \[2, 0\] is in 2 pieces"),
        ([[row(0, 4)], [row(0, 4)]], r"element \[0, 0\] is in 2 pieces"),
        ([[row(0, 4), row(0, 4)], []], r"element \[0, 0\] is in 2 pieces"),
        ([[row(0, 2)], [row(2, 4, rows=5)]], r"\[5, 3\] on rank 1, fp32 \[4, 3\] on a lower"),
        ([[row(0, 2)], [row(2, 4, dtype=torch.float64)]], "is fp64 .* on rank 1, fp32"),
        ([[row(0, 2), row(2, 4, rows=5)], []], "rank 0: entry 'm/w' has two shapes or types"),
        ([[row(0, 4)], [row(0, 4, name="../w")]], "rank 1: .*pattern"),
        ([[row(0, 4)], [row(0, 4, name="m/" + "x" * 300)]], "rank 1: .*256"),
        ([[], [row(0, 4, dtype=torch.float16)]], "rank 1: .*float16, not one of fp32, bf16"),
        ([[], [Piece("m/w", (4, 3), Region((0, 0), (4, 3)), torch.ones(3, 4))]], r"\[3, 4\] is no"),
        ([[], [Piece("m/w", (4, 3), Region((1, 0), (4, 3)), torch.ones(4, 3))]], "is not Region"),
    ],
)
def test_wrong_pieces_are_refused_on_every_rank(tmp_path, per_rank, message):
    previous = save_alone(tmp_path, 1)
    text = failing_save(tmp_path, per_rank)
    assert re.search(message, text), text
    assert find_newest(tmp_path) == (previous, [])


def test_ranks_of_two_runs_or_steps_are_refused(tmp_path):
    for step, run_id in [(2, "other"), (3, "a-run")]:

        def work(group, step=step, run_id=run_id):
            mine = (1 + (group.rank == 0), "a-run") if group.rank == 0 else (step, run_id)
            meta = Meta(mine[1], {}, {}, {})
            pieces = flat_cut(tensors(), group.rank, 2)
            return save(tmp_path, step=mine[0], pieces=pieces, meta=meta, group=group)

        for result in run_world(2, work):
            assert f"rank 1 saves step {step} of run '{run_id}'" in one_line(result)
    assert find_newest(tmp_path).path is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_json_lacks_is_refused(tmp_path, value):
    meta = Meta("a-run", {}, {"loss": value}, {})
    with pytest.raises(CheckpointError, match="rank 0: "):
        save(tmp_path, step=1, pieces=[row(0, 4)], meta=meta, group=SingleProcess())
    assert find_newest(tmp_path).path is None


def test_a_write_that_fails_on_one_rank_fails_on_all_in_one_line(tmp_path):
    """A limit on file sizes makes the operating system itself refuse the write."""
    previous = save_alone(tmp_path, 1)
    sizes = {0: 100, 1: 60_000}

    def work(group):
        n = sizes[group.rank]
        pieces = [Piece(f"m/{group.rank}", (n,), whole((n,)), torch.ones(n))]
        return save(tmp_path, step=2, pieces=pieces, meta=META, group=group)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        results = run_world(2, work)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for result in results:
        text = one_line(result)
        assert "rank 1: cannot write" in text
        assert os.strerror(errno.EFBIG) in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", previous.name]


def test_a_folder_that_cannot_be_made_is_one_line_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("in the way")
    results = run_world(
        3,
        lambda group: save(tmp_path / "file" / "x", step=1, pieces=[], meta=META, group=group),
    )
    for result in results:
        assert f"rank 0: {tmp_path}/file/x: {os.strerror(errno.ENOTDIR)}" in one_line(result)


def test_a_bug_in_one_rank_keeps_its_exception_and_stops_the_others(tmp_path):
    def pieces(rank):
        yield row(0, 4, name=f"m/{rank}")
        if rank == 1:
            raise ZeroDivisionError("a bug")

    results = run_world(
        3,
        lambda g: save(tmp_path, step=1, pieces=pieces(g.rank), meta=META, group=g),
    )
    assert isinstance(results[1], ZeroDivisionError)
    for result in (results[0], results[2]):
        assert "rank 1: ZeroDivisionError: a bug" in one_line(result)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path):
    previous = save_alone(tmp_path, 1)

    def work(group):
        pieces = flat_cut(tensors(), group.rank, 2)
        return save(tmp_path, step=2, pieces=pieces, meta=META, group=group, nbytes=10**18)

    for result in run_world(2, work):
        assert re.search(r"rank 0: .* GB free, 1e\+09 GB are to be written", one_line(result))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", previous.name]


def test_a_folder_that_is_not_shared_is_named(tmp_path):
    def work(group):
        root = tmp_path / f"node{group.rank}"
        return save(root, step=1, pieces=[row(0, 4)], meta=META, group=group)

    for result in run_world(2, work):
        assert "rank 1: " in one_line(result)
        assert "shared disk?" in str(result)


def test_pieces_may_be_a_generator_and_are_let_go(tmp_path):
    """At most one shard's tensors are alive at a time."""
    alive, peak, lock = 0, 0, threading.Lock()

    class Counted:
        def __init__(self):
            nonlocal alive, peak
            with lock:
                alive += 1
                peak = max(peak, alive)

        def __del__(self):
            nonlocal alive
            with lock:
                alive -= 1

    def pieces():
        for i in range(20):
            tensor = torch.full((256,), float(i))
            tensor.witness = Counted()
            yield Piece(f"m/{i}", (256,), whole((256,)), tensor)
            del tensor

    path = save(
        tmp_path, step=1, pieces=pieces(), meta=META, group=SingleProcess(), shard_bytes=3 * 1024
    )
    assert len(list(path.glob("*.safetensors"))) == 7
    assert alive == 0
    assert peak <= 4
