"""Arrays in files: every way to read them, and files that are cut or overwritten meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megapipe.data.dataset import Stream
from megapipe.data.indices import Blend, BlendSizes, IndexedDataset, Request, open_blend
from megapipe.data.indices import open_indices as opened_indices
from megapipe.data.packing import PackedDataset, PackingRule, open_packing
from megapipe.data.stored import (
    MemoryBudget,
    StoredArray,
    StoredFile,
    array,
    crc_of,
    write_checksums,
)
from megapipe.data.stored.checksums import BLOCK
from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.data.tokens.format import Header, idx_of
from megapipe.errors import DataError
from tests.parity.token_files import ROWS, written

DAMAGED = r"\.(idx|npy) (is damaged|ends at byte|has)"


@pytest.fixture(params=[True, False], ids=["with checksums", "without"])
def checked(request: pytest.FixtureRequest) -> bool:
    return request.param


def stored(path: Path, values: np.ndarray, *, checked: bool) -> StoredArray:
    path.write_bytes(b"12345" + values.tobytes())
    if checked:
        write_checksums(path)
    return StoredArray(StoredFile(path), values.dtype, 5, values.shape)


def cut(path: Path) -> None:
    os.truncate(path, BLOCK + 100)


def overwrite(path: Path) -> None:
    """Write other numbers, of the same size, behind the first block."""
    with open(path, "r+b") as file:
        file.seek(BLOCK)
        content = file.read()
        file.seek(BLOCK)
        file.write(bytes(byte ^ 1 for byte in content))


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 2)])
def test_rows_are_those_of_an_array(
    tmp_path: Path, shape: tuple[int, ...], checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array, "AT_ONCE", 999)
    values = np.arange(np.prod(shape), dtype="<i4").reshape(shape)
    random = np.random.default_rng(0)
    scattered, near = random.integers(0, ROWS, 50), ROWS - 50 + random.permutation(50)
    found = stored(tmp_path / "x", values, checked=checked)
    assert (len(found), found.shape, found.dtype) == (ROWS, shape, values.dtype)
    assert (found.nbytes, found.itemsize) == (values.nbytes, 4)
    for _ in range(2):  # from the file, and held
        for number in (0, 7, ROWS - 1, -1, -ROWS, np.int64(3)):
            assert np.array_equal(found[number], values[number])
        for some in (slice(None), slice(3, 9), slice(9, 3), slice(-5, None), slice(7, 10**9)):
            assert np.array_equal(found[some], values[some])
        for numbers in (scattered, near, near.astype(np.int32), near[:1], near[:0]):
            assert np.array_equal(found[numbers], values[numbers])
            assert found[numbers].dtype == values.dtype
        assert np.array_equal(np.concatenate(list(found.parts())), values)
        assert np.array_equal(np.concatenate(list(found.parts(5, 2005))), values[5:2005])
        assert np.array_equal(found.rows(ROWS - 2, ROWS), values[-2:])
        for wrong in ((-1, 3), (7, 6), (ROWS, ROWS + 1)):
            with pytest.raises(DataError, match=f"x has {ROWS} rows, not {wrong[0]} to {wrong[1]}"):
                found.rows(*wrong)
        for number in (ROWS, -ROWS - 1):
            with pytest.raises(IndexError):
                found[number]
        with pytest.raises(IndexError):
            found[np.array([3, ROWS])]
        for numbers in (scattered % (ROWS - 1), near[:1] - 1):
            pairs = values[numbers].tolist(), values[numbers + 1].tolist()
            assert len(shape) > 1 or found.pairs(numbers) == pairs
        found.hold()
    assert len(stored(tmp_path / "empty", values[:0], checked=checked)[:]) == 0


def test_the_sequences_of_a_token_file(tmp_path: Path, checked: bool) -> None:
    """Among them the last one, which no other follows, and empty ones."""
    lengths = np.random.default_rng(0).integers(0, 9, ROWS)
    with TokenWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.write(np.arange(lengths.sum()) % 251)
        writer.close_sequences(lengths, np.ones(ROWS, np.int64))
    if checked:
        write_checksums(idx_of(tmp_path / "x"))
    file = TokenFile(tmp_path / "x")
    begins = np.cumsum(lengths) - lengths
    for _ in range(2):  # from the file, and held
        for numbers in ([7], [0, 30_000, 5], [3, ROWS - 1], [ROWS - 1], [ROWS - 2, 9, 9]):
            starts, counts = file.spans(np.array(numbers))
            assert starts == begins[numbers].tolist()
            assert counts == lengths[numbers].tolist()
        for wrong in (-1, ROWS):
            with pytest.raises(DataError, match=r"x\.idx is damaged: a document has sequences"):
                file.spans(np.array([3, wrong]))
        file.offsets.hold()


def test_small_arrays_are_held_as_long_as_there_is_room(tmp_path: Path) -> None:
    room = MemoryBudget(together=6 * ROWS, each=4 * ROWS)
    values = np.arange(ROWS, dtype="<i4")

    def held(name: str, values: np.ndarray) -> bool:
        """Whether it is read once and no more."""
        found = stored(tmp_path / name, values, checked=False)
        room.hold([found, found])
        os.truncate(tmp_path / name, 10)
        if not found.is_in_memory:
            with pytest.raises(DataError):
                found[:]
            return False
        return np.array_equal(found[:], values)

    assert not held("a", values.astype("<i8")), "too large"
    assert held("b", values)
    assert not held("c", values), "no room"
    assert held("d", values[: ROWS // 2]), "just room enough, as the second time takes none"
    assert not held("e", values[:9])


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("damage", [cut, overwrite])
@pytest.mark.parametrize("name", ["lengths", "offsets", "documents"])
def test_an_index_of_a_token_file(
    tmp_path: Path, name: str, damage: Callable[[Path], None], before: bool, checked: bool
) -> None:
    """Without checksums an index that is cut is noticed; one that is overwritten is noticed only if
    a value is out of place."""
    path = idx_of(written(tmp_path / "x", checked=checked))
    file = None if before else TokenFile(tmp_path / "x")
    damage(path)
    if damage is overwrite and not checked:
        return

    def read() -> None:
        getattr(file or TokenFile(tmp_path / "x"), name)[:]

    with pytest.raises(DataError, match=DAMAGED):
        read()


def test_one_that_is_cut_ends_all_that_reads_it(tmp_path: Path) -> None:
    file = TokenFile(written(tmp_path / "x", checked=False))
    os.truncate(file.index_path, 100)
    for read in (
        lambda: file.starts(np.arange(5)),
        lambda: file.starts(np.array([5, 30_000])),
        lambda: list(file.document_lengths()),
        lambda: Stream.of(file),
        lambda: opened_indices(file, Request(range(ROWS), 8, None, 0), tmp_path / "cache"),
        lambda: open_packing(
            Stream(file, range(ROWS), range(4 * ROWS)), PackingRule(8), tmp_path / "c"
        ),
    ):
        with pytest.raises(DataError, match=r"x\.idx ends at byte 100: was it truncated\?"):
            read()


def test_a_header_that_is_overwritten(tmp_path: Path) -> None:
    """Signed tokens in place of unsigned ones: of the same size."""
    prefix = written(tmp_path / "x", checked=True)
    with open(idx_of(prefix), "r+b") as file:
        file.write(Header(np.dtype("<i2"), ROWS, ROWS + 1).pack())
    with pytest.raises(DataError, match=r"x\.idx is damaged: bytes 0 to 65536 do not"):
        TokenFile(prefix)


INDICES = ("document_index", "sample_index", "shuffle_index")
PACKING = ("samples", "starts", "lengths")
BLEND = ("dataset_index", "dataset_sample_index")


def sampled(name: str, folder: Path, room: MemoryBudget | None = None) -> Callable[[], object]:
    """Return a function that reads samples by the array of this name; with `room`, from memory."""
    file, cache = TokenFile(folder / "x"), folder / "cache"
    if name in BLEND:
        blend = Blend(open_blend(BlendSizes.weighted([0.3, 0.7], 4 * ROWS), cache), 2)
        return lambda: [blend(number) for number in range(0, len(blend), 100)]
    dataset: IndexedDataset | PackedDataset
    if name in INDICES:
        indices = opened_indices(file, Request(range(ROWS), 3, 2 * ROWS, 0), cache)
        if room is not None:
            room.hold([indices.shuffle])
        dataset = IndexedDataset(file, indices, 3)
    else:
        dataset = PackedDataset(file, open_packing(Stream.of(file), PackingRule(3), cache), 3, 0)
    return lambda: [dataset.labelled(number) for number in range(0, len(dataset), 100)]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("damage", [cut, overwrite])
@pytest.mark.parametrize("name", [*INDICES, *PACKING, *BLEND])
def test_a_cached_index(
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], None],
    before: bool,
) -> None:
    """None of it is in memory."""
    written(tmp_path / "x")
    read = sampled(name, tmp_path)
    read()
    (path,) = tmp_path.glob(f"cache/*/{name}.npy")
    assert path.stat().st_size > 2 * BLOCK
    if before:
        damage(path)
        with pytest.raises(DataError, match=DAMAGED):
            sampled(name, tmp_path)()
    else:
        read = sampled(name, tmp_path)
        damage(path)
        with pytest.raises(DataError, match=DAMAGED):
            read()


def test_one_that_is_held_is_compared_when_it_is_opened_and_then_its_file_is_not_read(
    tmp_path: Path,
) -> None:
    written(tmp_path / "x")
    read = sampled("shuffle_index", tmp_path, MemoryBudget())
    (path,) = tmp_path.glob("cache/*/shuffle_index.npy")
    overwrite(path)
    read()
    with pytest.raises(DataError, match=r"shuffle_index\.npy is damaged: bytes 65536 to"):
        sampled("shuffle_index", tmp_path, MemoryBudget())


def test_older_caches_without_checksums_are_read(tmp_path: Path) -> None:
    written(tmp_path / "x")
    for name in ("sample_index", "starts", "dataset_index"):
        sampled(name, tmp_path)()
    for path in tmp_path.glob("cache/*/*.crc"):
        path.unlink()
    for name in ("sample_index", "starts", "dataset_index"):
        sampled(name, tmp_path)()


@pytest.mark.parametrize("row", [[0, 0, 9**9, 0], [7, 0, 3, 0], [-9, 0, -8, 0]])
def test_an_old_index_that_names_what_is_not_there(tmp_path: Path, row: list[int]) -> None:
    written(tmp_path / "x")
    read = sampled("sample_index", tmp_path)
    (path,) = tmp_path.glob("cache/*/sample_index.npy")
    crc_of(path).unlink()
    samples = np.load(path)
    samples.reshape(-1)[:] = np.resize(np.array(row, samples.dtype), samples.size)
    np.save(path, samples)
    read = sampled("sample_index", tmp_path)
    with pytest.raises(DataError, match=r"sample_index\.npy is damaged: it has no place for"):
        read()
