"""Texts, a tokenizer and token files small enough to be made in a test."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megapipe.data.tokens import TokenWriter

TEXTS = [f"Document {i}: " + "the quick brown fox. " * (i % 7) + "äöü €\n" for i in range(60)]


def train_bpe(specials: list[str], vocab_size: int = 320) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def drop_privileges() -> None:
    """Give up root until the end of the test: file permissions do not bind root."""
    if os.geteuid() == 0:
        os.seteuid(65534)


def index_bytes(
    lengths: list[int],
    offsets: list[int],
    documents: list[int],
    *,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    code: int = 8,
    tail: bytes = b"",
) -> bytes:
    """Build an index by hand, from the table of the format."""
    return (
        magic
        + struct.pack("<Q", version)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(lengths))
        + struct.pack("<Q", len(documents))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(offsets)}q", *offsets)
        + struct.pack(f"<{len(documents)}q", *documents)
        + tail
    )


def by_hand(folder: Path, index: bytes, content: bytes) -> Path:
    (folder / "x.idx").write_bytes(index)
    (folder / "x.bin").write_bytes(content)
    return folder / "x"


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(texts: list[str] = TEXTS, field: str = "text") -> list[dict[str, Any]]:
    return [{"number": i, field: text} for i, text in enumerate(texts)]


Documents = list[list[list[int]]]
"""Sequences of documents."""


def write_documents(prefix: Path, documents: Documents, dtype: str = "<u2") -> Path:
    with TokenWriter(prefix, np.dtype(dtype)) as file:
        for document in documents:
            file.write(np.array([i for sequence in document for i in sequence], np.int64))
            lengths = np.array([len(sequence) for sequence in document], np.int32)
            file.close_sequences(lengths, np.array([len(document)]))
    return prefix
