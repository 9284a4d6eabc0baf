"""Tokenization of a corpus, once, into a cache folder that any number of runs share.

The folder is named by a digest of everything that determines its content. Of the processes and
nodes that share a file system and need the same corpus, one prepares it
(:mod:`~megapipe.data.prepare.build_once`). If that process is killed, it leaves no corpus, only
finished shards, and the next process continues from them.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from megapipe.config.data import DataConfig
from megapipe.config.section import Section
from megapipe.data.corpus import RowParser, identity
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.dataset import SPLITS, Split, Stream
from megapipe.data.prepare.build_once import build_once
from megapipe.data.prepare.held_out import divide
from megapipe.data.prepare.parts_folder import CorpusShardFolder
from megapipe.data.prepare.sizes import CorpusSizes
from megapipe.data.stored import crc_of, write_checksums
from megapipe.data.tokenizer import Encoder
from megapipe.data.tokens import TokenFile
from megapipe.data.tokens.format import bin_of, idx_of
from megapipe.errors import DataError

_FORMAT = 2
"""Version of the cache; increased when the same corpus would give other token files."""
_INDEX_CRC = ".idx.crc"


class Meta(Section):
    """Content of ``meta.json`` in the cache folder."""

    source: str
    """Value of ``data.source``."""
    tokenizer: str
    """Value of ``data.tokenizer``."""
    tokenizer_digest: str
    """Digest of the tokenizer."""
    vocab_size: int
    """Number of ids of the tokenizer."""
    eod: int
    """Id of the EOS token."""
    entropy: float
    """Unigram entropy of the corpus, with held-out tokens and EOS tokens, in nats per token."""
    train: CorpusSizes
    """Sizes of the training split."""
    validation: CorpusSizes | None
    """Sizes of the held-out split; None: nothing is held out."""
    files: dict[str, int]
    """Bytes of each file of tokens, indices and checksums, by name."""
    tokens: dict[str, str] | None = None
    """SHA-256, in hex, of the checksums of each token file; None in caches of older versions."""
    rows: RowCount = Field(default_factory=RowCount)
    """Counts of the rows of JSON and tables, and of rows without text; all 0 in older caches."""


@dataclass(frozen=True)
class Prepared:
    """A tokenized corpus.

    Attributes:
        folder: has train.bin, train.idx, meta.json, and with a held-out part validation.bin and
            validation.idx.
        digest: SHA-256, in hex, of everything that determines the content: source, tokenizer and
            split.
        meta: sizes and entropy.
    """

    folder: Path
    digest: str
    meta: Meta

    def part(self, split: Split) -> Stream | None:
        """Return the tokens of a split, None if there is none. Raises DataError if damaged."""
        exists = split == "train" or (split == "validation" and self.meta.validation is not None)
        return Stream.of(TokenFile(self.folder / split)) if exists else None

    @property
    def entropy(self) -> float:
        """Unigram entropy, in nats per token."""
        return self.meta.entropy

    @property
    def content(self) -> str:
        """SHA-256, in hex, of the result: tokens, sizes, entropy and tokenizer. It stays the same
        if the corpus's files are moved or copied. It does not cover an index's checksums, which
        older caches lack."""
        older = {"tokens"} if self.meta.tokens is None else set()
        files = {name: n for name, n in self.meta.files.items() if not name.endswith(_INDEX_CRC)}
        meta = self.meta.model_copy(update={"files": files})
        what = meta.model_dump_json(exclude={"source", "tokenizer", "rows", *older})
        return hashlib.sha256(what.encode()).hexdigest()


def prepare(
    config: DataConfig, tokenizer: Encoder, rows: RowParser | None = None, *, progress: bool = True
) -> Prepared:
    """Return the tokenized corpus of `config`, from the cache if the cache has it.

    A fraction of the documents, chosen by a hash of a document's number, is held out; training and
    validation get at least one document each. If the corpus is a single document, the end of the
    document is held out. With a fraction of 0 nothing is held out.

    Args:
        rows: parser that makes documents from rows, which `tokenizer.digest` must cover; default:
            a parser that takes the text in the field ``data.text_field``.
        progress: whether to show the progress.

    Raises:
        DataError: the corpus cannot be read, or the cache cannot be written or is damaged.
    """
    digest = _digest(config, tokenizer)
    folder = Path(config.cache, digest)
    parts = CorpusShardFolder(Path(config.cache, f".{digest}.parts"), config, tokenizer, rows)
    try:
        if not folder.exists():
            build_once(folder, lambda new: _build(parts, new, digest, progress=progress))
        parts.remove()
    except OSError as error:
        path = error.filename or config.cache
        raise DataError(f"cache {path} (data.cache): {error.strerror or error}") from error
    return Prepared(folder, digest, _checked_meta(folder))


def _digest(config: DataConfig, tokenizer: Encoder) -> str:
    content = [_FORMAT, identity(config), tokenizer.digest, config.validation_fraction]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _checked_meta(folder: Path) -> Meta:
    path = folder / "meta.json"
    repair = f"remove {folder} and it is rebuilt"
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


def _build(parts: CorpusShardFolder, folder: Path, digest: str, *, progress: bool) -> None:
    """Fill `folder`, which exists and is empty, with the tokenized corpus."""
    config, tokenizer = parts.config, parts.tokenizer
    divided = divide(parts, folder, progress=progress)
    if _digest(config, tokenizer) != digest:
        raise parts.has_changed()
    made = [name for name in SPLITS if bin_of(folder / name).exists()]
    tokens = {str(name): write_checksums(bin_of(folder / name)) for name in made}
    for name in made:
        write_checksums(idx_of(folder / name))
    both = [kind(folder / name) for name in made for kind in (bin_of, idx_of)]
    files = [*both, *map(crc_of, both)]
    meta = Meta(
        source=config.source,
        tokenizer=config.tokenizer,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        entropy=divided.entropy,
        train=divided.train,
        validation=divided.validation,
        files={path.name: path.stat().st_size for path in sorted(files)},
        tokens=tokens,
        rows=divided.rows,
    )
    with open(folder / "meta.json", "w") as file:
        file.write(meta.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
