"""Tokenizes a corpus once, into a cache folder that any number of runs share.

The folder is named by a digest of all that decides its content. Of the processes and nodes that
share a file system and need the same corpus one prepares it (:mod:`~megapipe.data.prepare.once`).
If it is killed it leaves nothing that could be taken for a corpus, but the parts that it has
finished: the next one goes on with them.
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
from megapipe.data.prepare.held_out import divide
from megapipe.data.prepare.once import build_once
from megapipe.data.prepare.parts_folder import CorpusShardFolder
from megapipe.data.prepare.sizes import CorpusSizes
from megapipe.data.stored import crc_of, write_checksums
from megapipe.data.tokenizer import Encoder
from megapipe.data.tokens import TokenFile
from megapipe.data.tokens.format import bin_of, idx_of
from megapipe.errors import DataError

_FORMAT = 2
"""Raised when the same corpus would come out as other token files."""
_INDEX_CRC = ".idx.crc"


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
    train: CorpusSizes
    """The tokens that are trained on."""
    validation: CorpusSizes | None
    """The tokens that are held out; None: none are."""
    files: dict[str, int]
    """Size in bytes of each file of tokens, indices and checksums."""
    tokens: dict[str, str] | None = None
    """SHA-256, in hex, of the checksums of each token file; None in older caches, without any."""
    rows: RowCount = Field(default_factory=RowCount)
    """Rows of JSON and tables, and what of them has no text; older caches do not know it."""


@dataclass(frozen=True)
class Prepared:
    """A tokenized corpus.

    Attributes:
        folder: holds train.bin, train.idx, meta.json, and validation.bin, validation.idx if some of
            it is held out.
        digest: SHA-256, in hex, of what decides the content: source, tokenizer and split.
        meta: sizes and entropy.
    """

    folder: Path
    digest: str
    meta: Meta

    def part(self, split: Split) -> Stream | None:
        """The tokens of a split. Raises DataError if they are damaged."""
        there = split == "train" or (split == "validation" and self.meta.validation is not None)
        return Stream.of(TokenFile(self.folder / split)) if there else None

    @property
    def entropy(self) -> float:
        """Unigram entropy, in nats per token."""
        return self.meta.entropy

    @property
    def content(self) -> str:
        """SHA-256, in hex, of what the corpus came out as: tokens, sizes, entropy and tokenizer. It
        stays the same where the files of a corpus are moved or copied, and the checksums of an
        index, which older caches lack, are left out."""
        older = {"tokens"} if self.meta.tokens is None else set()
        files = {name: n for name, n in self.meta.files.items() if not name.endswith(_INDEX_CRC)}
        meta = self.meta.model_copy(update={"files": files})
        what = meta.model_dump_json(exclude={"source", "tokenizer", "rows", *older})
        return hashlib.sha256(what.encode()).hexdigest()


def prepare(
    config: DataConfig, tokenizer: Encoder, rows: RowParser | None = None, *, progress: bool = True
) -> Prepared:
    """The tokenized corpus of `config`, from the cache if it is there.

    A share of the documents, chosen by a hash of their number in the corpus, is held out; each side
    has at least one. A corpus of a single document is divided within it, its end held out. Where
    the share is 0, nothing is.

    Args:
        rows: what is taken of rows, which the digest of `tokenizer` stands for; by default a text.
        progress: show it, on a terminal.

    Raises:
        DataError: the corpus cannot be read, or the cache not written, or what is there is damaged.
    """
    digest = _digest(config, tokenizer)
    folder = Path(config.cache, digest)
    parts = CorpusShardFolder(Path(config.cache, f".{digest}.parts"), config, tokenizer, rows)
    try:
        if not folder.exists():
            build_once(folder, lambda new: _build(parts, new, digest, progress=progress))
        parts.remove()
    except OSError as error:
        where = error.filename or config.cache
        raise DataError(f"cache {where} (data.cache): {error.strerror or error}") from error
    return Prepared(folder, digest, _checked_meta(folder))


def _digest(config: DataConfig, tokenizer: Encoder) -> str:
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


def _build(parts: CorpusShardFolder, folder: Path, digest: str, *, progress: bool) -> None:
    """Fill `folder`, which is there and empty, for a corpus of that digest."""
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
