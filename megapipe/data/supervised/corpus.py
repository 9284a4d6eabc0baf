"""Examples tokenized once into the cache, as other corpora are: by several processes, in parts.

Token i of a vocabulary of V is stored as i where it is a label, and as V + i where it is none: a
token file holds both, and all that is done with token files is done with these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from megapipe.config.data import DataConfig
from megapipe.data.dataset import Split, Stream
from megapipe.data.prepare import Prepared, prepare
from megapipe.data.supervised.markup import encode
from megapipe.data.supervised.rows import ExampleRows
from megapipe.data.supervised.turns import Template
from megapipe.data.tokenizer import Chat, TokenIds, Tokenizer
from megapipe.errors import DataError
from megapipe.util.paths import user_path

_FORMAT = 1
"""Raised when the same examples would come out as other tokens."""


@dataclass(frozen=True)
class Examples:
    """A tokenized corpus of examples."""

    prepared: Prepared

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of what decides the content."""
        return self.prepared.digest

    @property
    def content(self) -> str:
        """SHA-256, in hex, of what it came out as."""
        return self.prepared.content

    @property
    def entropy(self) -> None:
        """None: that of all tokens says nothing of those that are labels."""

    def part(self, split: Split) -> Stream | None:
        """The tokens of a split. Raises DataError if they are damaged."""
        return self.prepared.part(split)


def prepare_examples(
    config: DataConfig, tokenizer: Tokenizer, *, progress: bool = True
) -> Examples:
    """The examples of `config`, from the cache if they are there. Raises as
    :func:`~megapipe.data.prepare.prepare`, for a row that is none, and for a template that cannot
    be read."""
    rows = ExampleRows(
        config.prompt_field,
        config.completion_field,
        config.messages_field,
        config.tokenizer,
        template_of(config, tokenizer.chat),
        tuple(sorted(tokenizer.reserved)),
    )
    return Examples(prepare(config, ExampleEncoder(tokenizer, rows), rows, progress=progress))


def template_of(
    config: DataConfig, chat: Chat, named: str = "data.chat_template="
) -> Template | None:
    """The template in ``data.chat_template``, else the tokenizer's; None: there is none. Raises
    DataError for a file that cannot be read, with its name behind `named`."""
    text = chat.template
    if config.chat_template is not None:
        try:
            text = user_path(config.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise DataError(f"{named}{config.chat_template}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{named}{config.chat_template}: not UTF-8 text") from error
    return None if text is None else Template(text, chat.names, config.train_on)


class ExampleEncoder:
    """Tokenizes texts with marks; its ids are those that are stored."""

    def __init__(self, tokenizer: Tokenizer, rows: ExampleRows) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = 2 * tokenizer.vocab_size
        self.eod = tokenizer.eod
        chosen = asdict(rows)
        del chosen["tokenizer"]  # whose digest counts, not its name
        what = json.dumps([_FORMAT, tokenizer.digest, chosen], sort_keys=True)
        self.digest = hashlib.sha256(what.encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> TokenIds:
        ids, labels = encode(text, self.tokenizer)
        return np.where(labels, ids, ids + self.tokenizer.vocab_size)
