import os
import struct
import time
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.data.tokens import verify as verify_module
from megapipe.data.tokens import writer as writer_module
from megapipe.data.tokens.format import token_type
from megapipe.data.tokens.verify import verify
from megapipe.errors import DataError
from tests.unit.data.data_cases import by_hand, drop_privileges, index_bytes

DOCUMENTS = [np.array([5, 6, 7, 256]), np.array([256]), np.arange(200)]


def write(prefix: Path, vocab_size: int = 257, documents: list[np.ndarray] = DOCUMENTS) -> Path:
    with TokenWriter(prefix, token_type(vocab_size), vocab_size) as writer:
        for document in documents:
            writer.add(document)
    return prefix


def refused(prefix: Path, match: str, *, on_reading_all: bool = False) -> None:
    read = partial(verify, TokenFile(prefix)) if on_reading_all else partial(TokenFile, prefix)
    with pytest.raises(DataError, match=match) as info:
        read()
    assert "\n" not in str(info.value)
    assert str(prefix) in str(info.value)


def test_round_trip(tmp_path: Path) -> None:
    file = TokenFile(write(tmp_path / "x"))
    assert file.tokens.dtype == np.uint16
    assert file.tokens[:].tolist() == np.concatenate(DOCUMENTS).tolist()
    assert file.lengths[:].tolist() == [4, 1, 200]
    assert file.documents[:].tolist() == [0, 1, 2, 3]


def test_writes_the_format_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "x")
    expected = index_bytes([4, 1, 200], [0, 8, 10], [0, 1, 2, 3])
    assert (tmp_path / "x.idx").read_bytes() == expected
    assert (tmp_path / "x.bin").read_bytes() == np.concatenate(DOCUMENTS).astype("<u2").tobytes()


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(65499, 2), (65500, 4), (200000, 4)])
def test_token_type_follows_the_vocabulary(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    ids = np.array([0, vocab_size - 1])
    file = TokenFile(write(tmp_path / "x", vocab_size, [ids]))
    assert file.tokens.dtype == np.dtype("<u2" if itemsize == 2 else "<i4")
    assert file.tokens[:].tolist() == ids.tolist()
    assert (tmp_path / "x.idx").read_bytes()[17] == (8 if itemsize == 2 else 4)


@pytest.mark.parametrize(
    ("code", "form"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")]
)
def test_reads_every_integer_type(tmp_path: Path, code: int, form: str) -> None:
    size = struct.calcsize(form)
    index = index_bytes([2, 3], [0, 2 * size], [0, 1, 2], code=code)
    file = TokenFile(by_hand(tmp_path, index, struct.pack(f"<5{form}", 1, 2, 3, 4, 5)))
    assert file.tokens[:].tolist() == [1, 2, 3, 4, 5]


def test_reads_documents_of_several_sequences_and_modes(tmp_path: Path) -> None:
    index = index_bytes([2, 1, 0], [0, 4, 6], [0, 2, 2, 3], tail=b"\0\1\0")
    file = TokenFile(by_hand(tmp_path, index, struct.pack("<3H", 1, 2, 3)))
    assert file.documents[:].tolist() == [0, 2, 2, 3]


def test_a_document_too_long_for_a_sequence_has_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "LONGEST_SEQUENCE", 3)
    file = TokenFile(write(tmp_path / "x", documents=[np.arange(7), np.arange(3)]))
    assert file.lengths[:].tolist() == [3, 3, 1, 3]
    assert file.documents[:].tolist() == [0, 3, 4]
    assert file.tokens[:].tolist() == [*range(7), *range(3)]


@pytest.mark.parametrize("wrong", [-1, 257, 2**31, 65536 + 5])
def test_writer_refuses_ids_that_would_wrap_around(tmp_path: Path, wrong: int) -> None:
    documents = [np.array([1]), np.array([1, wrong])]
    with pytest.raises(DataError, match=f"position 2 for .*x.bin: token id {wrong} is outside"):
        write(tmp_path / "x", 257, documents)
    assert not (tmp_path / "x.idx").exists()  # nor after any other error


@pytest.mark.parametrize(
    ("given", "dtype", "vocab_size"),
    [("i1", "<u2", 300), ("i2", "<i4", 70000), ("i8", "<u2", 300), ("i4", "<i4", None)],
)
def test_negative_ids_are_refused_whatever_their_type(
    tmp_path: Path, given: str, dtype: str, vocab_size: int | None
) -> None:
    with TokenWriter(tmp_path / "x", np.dtype(dtype), vocab_size) as writer:
        writer.add(np.array([0, 127], given))
        with pytest.raises(DataError, match=r"position 3 for .*: token id -1 is outside"):
            writer.add(np.array([5, -1], given))


@pytest.mark.parametrize(
    ("offsets", "documents"), [([0, 10**15, 4], [0, 1, 3]), ([0, 2, 4], [0, -(10**12), 3])]
)
def test_places_outside_the_file_are_not_followed(
    tmp_path: Path, offsets: list[int], documents: list[int]
) -> None:
    prefix = by_hand(tmp_path, index_bytes([1, 1, 1], offsets, documents), bytes(6))
    file = TokenFile(prefix)
    with pytest.raises(DataError, match=r"x\.idx is damaged: a "):
        list(file.document_lengths())


@pytest.mark.parametrize("keep", [0, 1, 9, 33, 34, 60, -1])
def test_cut_index(tmp_path: Path, keep: int) -> None:
    prefix = write(tmp_path / "x")
    content = (tmp_path / "x.idx").read_bytes()
    (tmp_path / "x.idx").write_bytes(content[:keep])
    refused(prefix, r"x\.idx (is too short|has \d+ bytes, its header declares)")


def test_extended_index(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x")
    with open(tmp_path / "x.idx", "ab") as file:
        file.write(b"\0")
    refused(prefix, r"x\.idx has 103 bytes, its header declares 102")


@pytest.mark.parametrize("change", [-408, -1, 1, 2])
def test_cut_or_extended_tokens(tmp_path: Path, change: int) -> None:
    prefix = write(tmp_path / "x")
    os.truncate(tmp_path / "x.bin", 410 + change)
    refused(prefix, rf"x\.bin has {410 + change} bytes, .*x\.idx declares 410")


def test_swapped_files(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x")
    (tmp_path / "x.bin").rename(tmp_path / "y")
    (tmp_path / "x.idx").rename(tmp_path / "x.bin")
    (tmp_path / "y").rename(tmp_path / "x.idx")
    refused(prefix, "is not a token index: it does not start with MMIDIDX")


def test_tokens_of_another_corpus(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x")
    write(tmp_path / "y", 70000)
    (tmp_path / "y.bin").rename(tmp_path / "x.bin")
    refused(prefix, r"x\.bin has 820 bytes, .* declares 410")


@pytest.mark.parametrize(
    ("index", "match"),
    [
        (index_bytes([1], [0], [0, 1], magic=b"MMIDIDY\0\0"), "does not start with MMIDIDX"),
        (index_bytes([1], [0], [0, 1], version=2), "has version 2; only version 1"),
        (index_bytes([1], [0], [0, 1], code=6), "declares token type 6"),
        (index_bytes([1], [0], [0, 1], code=7), "declares token type 7"),
        (index_bytes([1], [0], [0, 1], code=0), r"type 0; known .*8 \(uint16\)"),
        (index_bytes([1], [0], [0, 2]), "boundaries do not run from 0 to 1"),
        (index_bytes([1], [0], [1, 1]), "boundaries do not run"),
        (index_bytes([], [], []), "boundaries do not run"),
        (index_bytes([2, 1], [0, 2], [0, 1, 2]), "declares 4$"),
    ],
)
def test_damaged_index(tmp_path: Path, index: bytes, match: str) -> None:
    refused(by_hand(tmp_path, index, struct.pack("<H", 1)), match)


@pytest.mark.parametrize(
    ("lengths", "offsets", "documents", "match"),
    [
        ([-1, 4], [0, -2], [0, 2], "sequence 0 has a negative length"),
        ([2, 1, 1], [0, 2, 4], [0, 1, 3], "sequence 1 does not start where"),
        ([1, 2], [2, 2], [0, 1, 2], "sequence 0 does not start where"),
        ([1, 1, 1], [0, 2, 4], [0, 2, 1, 3], "document 1 ends before it begins"),
        ([1, 1, 1], [0, 2, 4], [0, 1, 3], "token id 65535 at position 2 of .*x.bin"),
    ],
)
def test_damage_that_only_reading_all_finds(
    tmp_path: Path, lengths: list[int], offsets: list[int], documents: list[int], match: str
) -> None:
    content = struct.pack("<3H", 1, 2, 65535)
    prefix = by_hand(tmp_path, index_bytes(lengths, offsets, documents), content)
    if "token id" not in match:
        refused(prefix, match, on_reading_all=True)
    else:
        with pytest.raises(DataError, match=match):
            verify(TokenFile(prefix), 65535)
        verify(TokenFile(prefix), 65536)
        verify(TokenFile(prefix))


@pytest.mark.parametrize(
    "index", [([], [], [0]), ([], [], [0, 0]), ([0], [0], [0, 1]), ([0, 0], [0, 0], [0, 2])]
)
def test_no_tokens(tmp_path: Path, index: tuple[list[int], list[int], list[int]]) -> None:
    file = TokenFile(by_hand(tmp_path, index_bytes(*index), b""))
    assert file.tokens[:].tolist() == []
    verify(file, 1)


def test_a_header_that_claims_more_than_the_file_holds_costs_nothing(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x")
    content = bytearray((tmp_path / "x.idx").read_bytes())
    content[18:26] = struct.pack("<Q", 2**60)
    (tmp_path / "x.idx").write_bytes(content)
    start = time.process_time()
    refused(prefix, "its header declares")
    assert time.process_time() - start < 1


def test_an_index_is_checked_across_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "AT_ONCE", 2)
    tokens = struct.pack("<7H", *range(7))
    good = [2, 1, 0, 3, 1], [0, 4, 6, 6, 12], [0, 1, 1, 2, 5]
    file = TokenFile(by_hand(tmp_path, index_bytes(*good), tokens))
    assert (file.lengths[:].tolist(), file.documents[:].tolist()) == (good[0], good[2])
    steps: list[int] = []
    verify(file, 7, steps.append)
    assert steps == [4, 4, 4, 2]
    for wrong, match in (
        (([2, 1, 0, -3, 1], good[1], good[2]), "sequence 3 has a negative length"),
        ((good[0], [0, 4, 6, 4, 12], good[2]), "sequence 3 does not start where"),
        ((good[0], [0, 4, 4, 6, 12], good[2]), "sequence 2 does not start where"),
        ((good[0], good[1], [0, 1, 2, 1, 5]), "document 2 ends before it begins"),
    ):
        prefix = by_hand(tmp_path, index_bytes(*wrong), tokens)
        refused(prefix, match, on_reading_all=True)


def test_a_process_holds_no_copy_of_the_index(tmp_path: Path) -> None:
    n = 2**20
    starts = np.arange(n, dtype="<i8")
    header = index_bytes([1], [0], [0, 1], code=1)[:18] + struct.pack("<QQ", n, n + 1)
    (tmp_path / "x.idx").write_bytes(
        header + b"".join(a.tobytes() for a in (np.ones(n, "<i4"), starts, np.arange(n + 1)))
    )
    (tmp_path / "x.bin").write_bytes(bytes(n))
    tracemalloc.start()
    try:
        file = TokenFile(tmp_path / "x")
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(file.lengths) == n
    assert held < 2**16
    assert most < (tmp_path / "x.idx").stat().st_size / 2  # what is checked at a time


def test_sparse_tokens(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x")
    os.truncate(tmp_path / "x.bin", 2**40)
    refused(prefix, f"has {2**40} bytes")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_what_is_no_file(tmp_path: Path, suffix: str) -> None:
    prefix = write(tmp_path / "x")
    path = tmp_path / f"x{suffix}"
    path.unlink()
    refused(prefix, "No such file")
    path.mkdir()
    refused(prefix, "not a regular file")
    path.rmdir()
    os.mkfifo(path)
    refused(prefix, "not a regular file")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_unreadable(open_folder: Path, suffix: str) -> None:
    prefix = write(open_folder / "x")
    (open_folder / f"x{suffix}").chmod(0)
    drop_privileges()
    refused(prefix, "Permission denied")
