"""Tokenizes a part of a corpus into a token file, with what else is to be known of its documents.

Part 17 is ``000017.bin`` and ``000017.idx``, and ``000017.npz`` with a digest of what it was made
of, the bytes of text of each document, and how often each token occurs. It is there in full or not
at all: the index gets its name last.
"""

import hashlib
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megapipe.data.corpus import CorpusShard, TextChunk
from megapipe.data.corpus.cutting import LONGEST
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.tokenizer import Encoder
from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.data.tokens.format import bin_of, idx_of, token_type

_FORMAT = 1
"""Raised when the same part would come out otherwise."""
BATCH = 2**20
"""Characters that are tokenized at a time."""


@dataclass(frozen=True)
class Summary:
    """Facts of the documents of a part besides their tokens.

    Attributes:
        text_bytes: bytes of each document as UTF-8 [d].
        ids: the tokens that occur, end marks included [u].
        counts: how often each of them does [u].
        rows: those that were read, and what of them has no text.
    """

    text_bytes: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    rows: RowCount


def prefix_of(folder: Path, number: int) -> Path:
    """Prefix of the files of part `number`."""
    return folder / f"{number:06}"


def finished(prefix: Path, part: CorpusShard) -> Summary | None:
    """The summary of a part that is there; None if it is not, is damaged, or is another."""
    try:
        TokenFile(prefix)
        with np.load(summary_file(prefix)) as stored:
            if stored["made_of"].item() != _made_of(part):
                return None
        return read_summary(prefix)
    except Exception:  # whatever a file that was cut short makes its reader raise
        return None


def read_summary(prefix: Path) -> Summary:
    """The summary that was stored beside a part. Raises OSError if it is gone."""
    with np.load(summary_file(prefix)) as stored:
        arrays = stored["text_bytes"], stored["ids"], stored["counts"]
        return Summary(*arrays, RowCount(*stored["rows"].tolist()))


def summary_file(prefix: Path) -> Path:
    """Where that is stored."""
    return prefix.with_name(prefix.name + ".npz")


def encode(part: CorpusShard, tokenizer: Encoder, prefix: Path) -> Summary:
    """Tokenize a part into the files of `prefix`; empty documents are left out.

    Raises:
        DataError: a text cannot be read, or its ids are outside the vocabulary.
        OSError: a file cannot be written.
    """
    working = prefix.with_name(f".{prefix.name}.{uuid.uuid4().hex}")
    try:
        summary = _encode(part, tokenizer, working)
        with open(summary_file(working), "wb") as file:
            stored = {**vars(summary), "rows": np.array(astuple(summary.rows))}
            np.savez(file, made_of=np.array(_made_of(part)), **stored)
        for name in (bin_of, summary_file, idx_of):
            name(working).rename(name(prefix))
        return summary
    finally:
        for name in (bin_of, summary_file, idx_of):
            name(working).unlink(missing_ok=True)


def _made_of(part: CorpusShard) -> str:
    """Digest of what a part is made of, and how."""
    return hashlib.sha256(repr((_FORMAT, LONGEST, part)).encode()).hexdigest()


def _encode(part: CorpusShard, tokenizer: Encoder, prefix: Path) -> Summary:
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    text_bytes: list[int] = []
    length = nbytes = 0  # of the document that has begun
    end, count = np.array([tokenizer.eod]), RowCount()
    vocab_size = tokenizer.vocab_size
    with TokenWriter(prefix, token_type(vocab_size), vocab_size) as writer:
        for batch in batches(part.pieces(count)):
            texts = [count.replace_surrogates(piece.text) for piece in batch]
            ids, lengths = [], []
            for piece, text, found in zip(batch, texts, tokenizer.encode_batch(texts), strict=True):
                ids.append(found)
                length += len(found)
                nbytes += len(text.encode())
                if piece.ends:
                    if piece.end_mark:
                        ids.append(end)
                    lengths.append(length + piece.end_mark)
                    text_bytes.append(nbytes)
                    length = nbytes = 0
            together = np.concatenate(ids)
            writer.write(together)
            writer.close_documents(lengths)
            counts += np.bincount(together, minlength=vocab_size)
    (occurring,) = counts.nonzero()
    sizes = np.array(text_bytes, np.int64)
    return Summary(sizes, occurring, counts[occurring], count)


def batches(pieces: Iterable[TextChunk]) -> Iterator[list[TextChunk]]:
    """Lists of pieces that have text, each ending where it has the characters of a batch."""
    batch: list[TextChunk] = []
    characters = 0
    for piece in pieces:
        if not piece.text:
            continue
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
