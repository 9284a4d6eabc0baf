"""Documents to score: of a corpus, of a token file, or given as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapipe.config.data import DataConfig
from megapipe.data import corpus
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.given import is_token_file
from megapipe.data.tokenizer import Tokenizer
from megapipe.data.tokens import TokenFile
from megapipe.data.tokens.format import without_suffix
from megapipe.data.tokens.verify import verify


@dataclass(frozen=True)
class Document:
    """Tokens of a document, and the bytes of its text in UTF-8."""

    ids: Sequence[int]
    bytes: int


def of_source(config: DataConfig, tokenizer: Tokenizer, count: RowCount) -> Iterator[Document]:
    """Yield the documents of ``data.source``: texts, of which empty ones are left out and counted
    in `count`, or a token file, whose documents have the marks at their ends that are in the file.

    Raises DataError for what cannot be read, and where there is no text.
    """
    if is_token_file(config.source):
        yield from _of_token_file(Path(config.source).expanduser(), tokenizer)
        return
    ids: list[int] = []
    nbytes = documents = 0
    for piece in corpus.pieces(config, count):
        ids += map(int, tokenizer.encode(piece.text))
        nbytes += len(piece.text.encode())
        if piece.ends and nbytes:
            yield Document(ids, nbytes)
            documents += 1
            ids, nbytes = [], 0
    if not documents:
        raise count.no_text(config.source, config.text_field)


def of_texts(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Document]:
    """Each text as a document."""
    for text in texts:
        ids = [int(token) for token in tokenizer.encode(text)]
        yield Document(ids, len(text.encode(errors="replace")))


def joined(documents: Iterable[Document], end: int) -> Iterator[Document]:
    """All documents as one, as training reads them: behind each the token `end`, unless it is there
    already; none behind the last one that lacks it."""
    ids: list[int] = []
    nbytes = 0
    for document in documents:
        if ids and ids[-1] != end:
            ids.append(end)
        ids += document.ids
        nbytes += document.bytes
    yield Document(ids, nbytes)


def _of_token_file(path: Path, tokenizer: Tokenizer) -> Iterator[Document]:
    file = TokenFile(without_suffix(path))
    verify(file, tokenizer.vocab_size)
    for number in range(len(file)):
        start, stop = file.starts(file.documents[number : number + 2]).tolist()
        ids: list[int] = file.read(start, stop).tolist()
        yield Document(ids, len(tokenizer.decode(ids).encode(errors="replace")))
