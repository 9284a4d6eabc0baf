"""Tokenization of a corpus shard into a token file, with a summary of the documents.

Shard 17 becomes the token file ``000017.bin``, ``000017.idx``. The file ``000017.npz`` has a digest
of the input and the summary: text bytes of each document, and how often each token occurs. A
tokenized shard is complete or absent, because its ``.idx`` is the last file to get its name.
"""

import hashlib
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megapipe.data.corpus import CorpusShard, TextChunk
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.corpus.text_chunks import LONGEST
from megapipe.data.tokenizer import Encoder
from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.data.tokens.format import bin_of, idx_of, token_type

_FORMAT = 1
"""Version of the shards' files; increased when the same shard would give other files."""
BATCH = 2**20
"""Number of characters that are tokenized at a time."""


@dataclass(frozen=True)
class Summary:
    """Sizes and counts of a shard's d documents with u different tokens.

    Attributes:
        text_bytes: size of each document in bytes as UTF-8 [d].
        ids: the tokens that occur, including EOS tokens [u].
        counts: how often each of these tokens occurs [u].
        rows: counts of the rows read, and of rows without text.
    """

    text_bytes: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    rows: RowCount


def prefix_of(folder: Path, number: int) -> Path:
    """Return the prefix of the files of shard `number`."""
    return folder / f"{number:06}"


def finished(prefix: Path, part: CorpusShard) -> Summary | None:
    """Return the summary of the tokenized shard in the files `prefix`; None if the files are
    missing or damaged, or were not made from `part`."""
    try:
        TokenFile(prefix)
        with np.load(summary_file(prefix)) as stored:
            if stored["made_of"].item() != _made_of(part):
                return None
        return read_summary(prefix)
    except Exception:  # whatever a truncated file makes its reader raise
        return None


def read_summary(prefix: Path) -> Summary:
    """Return the summary in a shard's files. Raises OSError if it is missing."""
    with np.load(summary_file(prefix)) as stored:
        arrays = stored["text_bytes"], stored["ids"], stored["counts"]
        return Summary(*arrays, RowCount(*stored["rows"].tolist()))


def summary_file(prefix: Path) -> Path:
    """Return the path of a shard's summary, from the shard's prefix."""
    return prefix.with_name(prefix.name + ".npz")


def encode(part: CorpusShard, tokenizer: Encoder, prefix: Path) -> Summary:
    """Tokenize a shard into files with `prefix`; empty documents are skipped.

    Raises:
        DataError: a text cannot be read, or an id is outside the vocabulary.
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
    """Return a digest of a shard's input and of everything that determines its tokens."""
    return hashlib.sha256(repr((_FORMAT, LONGEST, part)).encode()).hexdigest()


def _encode(part: CorpusShard, tokenizer: Encoder, prefix: Path) -> Summary:
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    text_bytes: list[int] = []
    length = nbytes = 0  # of the current document
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
                    if piece.append_eos:
                        ids.append(end)
                    lengths.append(length + piece.append_eos)
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
    """Group text chunks that are not empty into lists of about :data:`BATCH` characters."""
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
