"""Documents to score: from a corpus, from a token file, or given as texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapipe.config.data import DataConfig
from megapipe.data import corpus
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.token_file_corpus import is_token_file
from megapipe.data.tokenizer import Tokenizer
from megapipe.data.tokens import TokenFile
from megapipe.data.tokens.format import without_suffix
from megapipe.data.tokens.verify import verify


@dataclass(frozen=True)
class Document:
    """Tokens of a document, and the number of bytes of its text in UTF-8."""

    ids: Sequence[int]
    bytes: int


def of_source(config: DataConfig, tokenizer: Tokenizer, count: RowCount) -> Iterator[Document]:
    """Yield the documents of ``data.source``. Empty texts are left out; `count` counts them. The
    documents of a token file include the end marks that are in the file.

    Raises DataError if the documents cannot be read, or if there is no text.
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
    """Yield each text as a document."""
    for text in texts:
        ids = [int(token) for token in tokenizer.encode(text)]
        yield Document(ids, len(text.encode(errors="replace")))


def joined(documents: Iterable[Document], end: int) -> Iterator[Document]:
    """Yield one document that joins all documents, as training reads them. The EOS token `end` is
    put between two documents, unless the first of them ends with it already. It is not added after
    the final document."""
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
