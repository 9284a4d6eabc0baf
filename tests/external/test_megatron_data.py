"""megapipe reads token files of megatron-core's builder, and megatron-core reads token files of
megapipe. Runs if megatron-core is installed."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megapipe.data.commands import main
from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.data.tokens.format import token_type
from megapipe.data.tokens.verify import verify

indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")

DOCUMENTS = [[[1, 2, 3], [4]], [[5]], [[]], [[6, 7], [8], [9, 10, 65498]]]
"""Documents, each with its sequences."""


def theirs(prefix: Path, dtype: type) -> Path:
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in DOCUMENTS:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def ours(prefix: Path, vocab_size: int) -> Path:
    with TokenWriter(prefix, token_type(vocab_size), vocab_size) as writer:
        for document in DOCUMENTS:
            writer.write(np.array([i for sequence in document for i in sequence], np.int64))
            lengths = np.array([len(sequence) for sequence in document], np.int32)
            writer.close_sequences(lengths, np.array([len(document)]))
    return prefix


@pytest.mark.parametrize(("dtype", "vocab_size"), [(np.uint16, 65499), (np.int32, 65500)])
def test_the_same_bytes(tmp_path: Path, dtype: type, vocab_size: int) -> None:
    theirs(tmp_path / "theirs", dtype)
    ours(tmp_path / "ours", vocab_size)
    assert indexed.DType.optimal_dtype(vocab_size) == dtype
    for suffix in (".bin", ".idx"):
        one, other = (tmp_path / f"{name}{suffix}" for name in ("theirs", "ours"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_their_files_are_read(tmp_path: Path, dtype: type) -> None:
    if np.iinfo(dtype).max < 65498:
        documents = [[[i % 100 for i in sequence] for sequence in d] for d in DOCUMENTS]
    else:
        documents = DOCUMENTS
    builder = indexed.IndexedDatasetBuilder(f"{tmp_path / 'x'}.bin", dtype=dtype)
    for document in documents:
        flat = [i for sequence in document for i in sequence]
        builder.add_document(torch.tensor(flat), [len(sequence) for sequence in document])
    builder.finalize(f"{tmp_path / 'x'}.idx")
    file = TokenFile(tmp_path / "x")
    verify(file, 65499)
    assert file.tokens.dtype == dtype
    assert len(file) == len(documents)
    starts = file.starts(file.documents[:])
    for number, document in enumerate(documents):
        found = file.tokens[starts[number] : starts[number + 1]].tolist()
        assert found == [i for sequence in document for i in sequence]


def test_their_reader_reads_what_the_command_writes(tmp_path: Path) -> None:
    texts = ["one", "two two", "three\nthree"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    prefix = tmp_path / "out" / "x"
    assert main(["--source", str(tmp_path), "--output", str(prefix)]) == 0
    found = indexed.IndexedDataset(str(prefix))
    assert len(found) == 3
    assert [found[i].tolist() for i in range(3)] == [[*text.encode(), 256] for text in texts]
    assert found.document_indices.tolist() == [0, 1, 2, 3]


def test_their_merge_is_ours(tmp_path: Path) -> None:
    for name in "ab":
        theirs(tmp_path / name, np.uint16)
    builder = indexed.IndexedDatasetBuilder(f"{tmp_path / 'all'}.bin", dtype=np.uint16)
    for name in "ab":
        builder.add_index(str(tmp_path / name))
    builder.finalize(f"{tmp_path / 'all'}.idx")
    assert main(["merge", *(str(tmp_path / name) for name in ("ours", "a", "b"))]) == 0
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"all{suffix}").read_bytes() == (tmp_path / f"ours{suffix}").read_bytes()
