"""Tokenizes a corpus once, into a cache folder that any number of runs share.

The folder is named by a digest of all that decides its content. Of the processes and nodes that
share a file system and need the same corpus one prepares it (:mod:`megapipe.data.once`), and one
that is killed leaves nothing that could be taken for a corpus.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from megapipe.config import DataConfig
from megapipe.data.corpus import documents, identity
from megapipe.data.once import make_once
from megapipe.data.order import splitmix64
from megapipe.data.tokenizer import Tokenizer
from megapipe.data.tokens import TokenWriter
from megapipe.errors import DataError
from megapipe.section import Section

_FORMAT = 1
"""Raised when the same corpus would come out as other token files."""
_SPLITS = ("train", "validation")
_BATCH_CHARACTERS = 2**22
"""Text that is tokenized at a time."""


class Split(Section):
    """Sizes of one side of the hold-out."""

    documents: int
    """Documents."""
    tokens: int
    """Tokens, the end mark of each document included."""
    text_bytes: int
    """Bytes of the text as UTF-8."""


class Meta(Section):
    """The content of meta.json in the cache folder."""

    source: str
    """`data.source`."""
    tokenizer: str
    """`data.tokenizer`."""
    tokenizer_digest: str
    """Digest of the tokenizer."""
    vocab_size: int
    """Ids of the tokenizer."""
    eod: int
    """Id of the end mark."""
    entropy: float
    """Unigram entropy of the corpus, both sides and end marks included, in nats per token."""
    train: Split
    """The tokens that are trained on."""
    validation: Split
    """The tokens that are held out."""
    files: dict[str, int]
    """Size in bytes of each token file."""


@dataclass(frozen=True)
class Prepared:
    """A tokenized corpus.

    Attributes:
        folder: holds train.bin, train.idx, validation.bin, validation.idx, meta.json.
        digest: SHA-256, in hex, of what decides the content: source, tokenizer and split.
        meta: sizes and entropy.
    """

    folder: Path
    digest: str
    meta: Meta

    @property
    def entropy(self) -> float:
        """Unigram entropy, in nats per token."""
        return self.meta.entropy

    @property
    def content(self) -> str:
        """SHA-256, in hex, of what the corpus came out as: sizes, entropy and tokenizer. It stays
        the same where the files of a corpus are moved or copied."""
        what = self.meta.model_dump_json(exclude={"source", "tokenizer"})
        return hashlib.sha256(what.encode()).hexdigest()


def prepare(config: DataConfig, tokenizer: Tokenizer, *, progress: bool = True) -> Prepared:
    """The tokenized corpus of `config`, from the cache if it is there.

    A share of the documents, chosen by a hash of their number in the corpus, is held out; each side
    has at least one. A corpus of a single document is divided within it, its end held out.

    Args:
        progress: show it, on a terminal.

    Raises:
        DataError: the corpus cannot be read, or the cache not written, or what is there is damaged.
    """
    digest = _digest(config, tokenizer)
    folder = Path(config.cache, digest)
    try:
        if not folder.exists():
            make_once(folder, lambda new: _build(config, tokenizer, new, progress=progress))
    except OSError as error:
        where = error.filename or config.cache
        raise DataError(f"cache {where} (data.cache): {error.strerror or error}") from error
    return Prepared(folder, digest, _checked_meta(folder))


def _digest(config: DataConfig, tokenizer: Tokenizer) -> str:
    content = [_FORMAT, identity(config), tokenizer.digest, config.validation_fraction]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _checked_meta(folder: Path) -> Meta:
    path = folder / "meta.json"
    repair = f"remove {folder} to have it made again"
    try:
        meta = Meta.model_validate_json(path.read_bytes())
        for name, size in meta.files.items():
            found = (folder / name).stat().st_size
            if found != size:
                raise DataError(f"{folder / name} has {found} bytes, not {size}: {repair}")
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}: {repair}") from error
    except ValidationError as error:
        raise DataError(f"{path} is damaged: {repair}") from error
    return meta


def _build(config: DataConfig, tokenizer: Tokenizer, folder: Path, *, progress: bool) -> None:
    """Fill `folder`, which is there and empty."""
    meta = _tokenize(config, tokenizer, folder, progress=progress)
    with open(folder / "meta.json", "w") as file:
        file.write(meta.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _tokenize(config: DataConfig, tokenizer: Tokenizer, folder: Path, *, progress: bool) -> Meta:
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    text_bytes = dict.fromkeys(_SPLITS, 0)
    texts = _assign(documents(config), config)
    with ExitStack() as stack:
        bar = stack.enter_context(_progress_bar(progress))
        task = bar.add_task(f"tokenizing {config.source}", total=None, documents=0, megabytes=0.0)
        writers = {
            split: stack.enter_context(TokenWriter(folder / split, tokenizer.vocab_size))
            for split in _SPLITS
        }
        for batch in _batches(texts):
            encoded = tokenizer.encode_batch([text for _, text in batch])
            for (split, text), ids in zip(batch, encoded, strict=True):
                writers[split].add(np.append(ids, tokenizer.eod))
                text_bytes[split] += len(text.encode())
            counts += np.bincount(np.concatenate(encoded), minlength=tokenizer.vocab_size)
            counts[tokenizer.eod] += len(batch)
            bar.update(
                task,
                documents=sum(writer.documents for writer in writers.values()),
                megabytes=sum(text_bytes.values()) / 1e6,
            )
    sizes = {
        split: Split(documents=writer.documents, tokens=writer.tokens, text_bytes=text_bytes[split])
        for split, writer in writers.items()
    }
    return Meta(
        source=config.source,
        tokenizer=config.tokenizer,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        entropy=unigram_entropy(counts),
        train=sizes["train"],
        validation=sizes["validation"],
        files={
            path.name: path.stat().st_size
            for split in sorted(_SPLITS)
            for path in sorted(folder.glob(f"{split}.*"))
        },
    )


def _assign(texts: Iterator[str], config: DataConfig) -> Iterator[tuple[str, str]]:
    """Each text with the side it belongs to; the last one goes where there is none yet."""
    sides = set()
    number, text = 0, next(texts)
    for following in texts:
        side = _side(number, config.validation_fraction)
        sides.add(side)
        yield side, text
        number, text = number + 1, following
    missing = set(_SPLITS) - sides
    if number:
        yield (missing or {_side(number, config.validation_fraction)}).pop(), text
        return
    cut = min(max(round(len(text) * (1 - config.validation_fraction)), 1), len(text) - 1)
    if cut < 1:
        raise DataError(f"corpus {config.source!r} has a single character: nothing to hold out")
    yield "train", text[:cut]
    yield "validation", text[cut:]


def _side(number: int, validation_fraction: float) -> str:
    return "validation" if splitmix64(number) < validation_fraction * 2**64 else "train"


def _batches(texts: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Lists of texts, each ending where it has the characters that are tokenized in one call."""
    batch: list[tuple[str, str]] = []
    characters = 0
    for split, text in texts:
        batch.append((split, text))
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of drawing a token at random from a corpus, given how often each occurs."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _progress_bar(wanted: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}: {task.fields[documents]:,} documents"),
        TextColumn("{task.fields[megabytes]:,.1f} MB"),
        TimeElapsedColumn(),
        console=console,
        disable=not (wanted and console.is_terminal),
        transient=True,
    )
