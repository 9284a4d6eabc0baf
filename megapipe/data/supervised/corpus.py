"""Examples, tokenized once into the cache like other corpora: by several processes, in shards.

With V token ids in the vocabulary, token i is stored as i if it is a label and as V + i if not. So
one token file contains tokens and labels, and every operation on token files applies.
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
from megapipe.data.supervised.chat_turns import Template
from megapipe.data.supervised.markup import encode
from megapipe.data.supervised.rows import ExampleRows
from megapipe.data.tokenizer import Chat, TokenIds, Tokenizer
from megapipe.errors import DataError
from megapipe.util.paths import user_path

_FORMAT = 1
"""Version of the tokenization; increased when the same examples would get other tokens."""


@dataclass(frozen=True)
class Examples:
    """A tokenized corpus of examples."""

    prepared: Prepared

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of everything that determines the examples' content."""
        return self.prepared.digest

    @property
    def content(self) -> str:
        """SHA-256, in hex, of the tokens; does not depend on where the corpus is stored."""
        return self.prepared.content

    @property
    def entropy(self) -> None:
        """None, as the entropy of all tokens says nothing about the labels."""

    def part(self, split: Split) -> Stream | None:
        """Return the tokens of a split. Raises DataError if they are damaged."""
        return self.prepared.part(split)


def prepare_examples(
    config: DataConfig, tokenizer: Tokenizer, *, progress: bool = True
) -> Examples:
    """Return the tokenized examples of `config`, from the cache if the cache has them. Raises the
    errors of :func:`~megapipe.data.prepare.prepare`, and DataError for an invalid row or
    template."""
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
    """Return the template of ``data.chat_template``, else the tokenizer's template, else None.
    Raises DataError, with `named` and the path, if the template's file cannot be read."""
    text = chat.template
    if config.chat_template is not None:
        try:
            text = user_path(config.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise DataError(f"{named}{config.chat_template}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{named}{config.chat_template}: not UTF-8 text") from error
    return None if text is None else Template(text, chat.names, config.loss_turns)


class ExampleEncoder:
    """Tokenizes marked texts (:mod:`megapipe.data.supervised.markup`). With V ids in the
    vocabulary, token i becomes i if it is a label, and V + i if not."""

    def __init__(self, tokenizer: Tokenizer, rows: ExampleRows) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = 2 * tokenizer.vocab_size
        self.eod = tokenizer.eod
        chosen = asdict(rows)
        del chosen["tokenizer"]  # the tokenizer's digest counts, not its name
        what = json.dumps([_FORMAT, tokenizer.digest, chosen], sort_keys=True)
        self.digest = hashlib.sha256(what.encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> TokenIds:
        ids, labels = encode(text, self.tokenizer)
        return np.where(labels, ids, ids + self.tokenizer.vocab_size)
