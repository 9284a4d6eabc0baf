"""The corpora of a run, for training, validation and test, by the names that the user gave."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.config.data import ONLY, DataConfig
from megapipe.data.dataset import SPLITS, Corpus, Dataset, Split, Stream
from megapipe.data.fill_in_the_middle import fim_tokens_of
from megapipe.data.prepare import Prepared, prepare
from megapipe.data.remote import fetched
from megapipe.data.supervised import Examples, count_too_long, prepare_examples
from megapipe.data.token_file_corpus import TokenFileCorpus, given_tokens, is_token_file
from megapipe.data.tokenizer import Tokenizer
from megapipe.data.user_dataset import own_data
from megapipe.util.user_code import is_source


class HeldOut(NamedTuple):
    """A held-out set, on which losses are computed."""

    name: str
    """The name that the user gave, or :data:`ONLY`."""
    split: Split
    part: Stream | Dataset


@dataclass(frozen=True)
class Sources:
    """All corpora of a run.

    Attributes:
        training: training corpora by name; the held-out parts of these corpora are for validation.
        validation: corpora of ``data.validation``; if given, they replace the held-out parts.
        test: corpora of ``data.test``.
        tokenizer: SHA-256, in hex, of what determines the ids of texts and of the EOS token.
    """

    training: Mapping[str, Corpus]
    validation: Mapping[str, Corpus]
    test: Mapping[str, Corpus]
    tokenizer: str

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of everything that determines the training data."""
        return self._of_training(lambda corpus: corpus.digest)

    @property
    def content(self) -> str:
        """SHA-256, in hex, that identifies the training data and does not depend on paths."""
        return self._of_training(lambda corpus: corpus.content)

    @property
    def everything(self) -> str:
        """SHA-256, in hex, that identifies the data of training, validation and test."""
        rest = [corpus.content for some in (self.validation, self.test) for corpus in some.values()]
        return hashlib.sha256(json.dumps([self.content, *rest]).encode()).hexdigest()

    @property
    def files(self) -> list[str | None]:
        """SHA-256, in hex, of all bytes of each token file and index that the user gave; None for a
        file without checksums. `everything` covers only some of these bytes."""
        some = (self.training, self.validation, self.test)
        every = chain.from_iterable(corpora.values() for corpora in some)
        given = (corpus.file for corpus in every if isinstance(corpus, TokenFileCorpus))
        return [content for file in given for content in file.contents]

    def is_like(self, everything: str, files: Sequence[str | None]) -> bool:
        """Whether this process has the same data as the process whose :attr:`everything` and
        :attr:`files` are given. A file is not compared if one of the processes lacks its
        checksums."""
        return self.everything == everything and all(
            mine == theirs or None in (mine, theirs)
            for mine, theirs in zip(self.files, files, strict=True)
        )

    @property
    def entropy(self) -> float | None:
        """Unigram entropy of a single source, in nats per token; None if unknown."""
        return self.training[ONLY].entropy if ONLY in self.training else None

    def held_out(self) -> Iterator[HeldOut]:
        """Yield the held-out sets for validation and test. Raises DataError if a set is damaged."""
        named: Mapping[Split, Mapping[str, Corpus]] = {
            "validation": self.validation,
            "test": self.test,
        }
        for split, given in named.items():
            for name, corpus in (given or self.training).items():
                part = corpus.part(split)
                if part is None and given:
                    part = corpus.part("train")  # all of it
                if part is not None:
                    yield HeldOut(name, split, part)

    def _of_training(self, of: Callable[[Corpus], str]) -> str:
        if ONLY in self.training:
            return of(self.training[ONLY])
        known = [[name, of(corpus)] for name, corpus in self.training.items()]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def prefetches(data: DataConfig) -> bool:
    """Whether samples are read in a separate thread (``data.prefetch``)."""
    if data.prefetch is not None:
        return data.prefetch
    return not any(is_source(source.source) for source in data.sources.values())


def load_sources(config: Config, tokenizer: Tokenizer, *, progress: bool = True) -> Sources:
    """Load the corpora of a resolved configuration; texts are tokenized, or read from the cache.

    Raises :class:`DataError` if a corpus cannot be loaded.
    """
    data = config.data
    if data.fim_rate:
        fim_tokens_of(data, tokenizer)  # before texts are tokenized in vain
    plain = {"validation_fraction": 0.0, "split": None, "subset": None, "dataset_split": None}
    whole = data.model_copy(update=plain)
    training: list[Split] = ["train"] if data.validation else ["train", "validation"]

    def load(given: DataConfig, *splits: Split) -> Corpus:
        given = fetched(given, progress=progress)
        if is_source(given.source):
            return own_data(config, given.source, tokenizer, splits)
        if is_token_file(given.source):
            return given_tokens(given)
        if data.sample_format == "supervised":
            examples = prepare_examples(given, tokenizer, progress=progress)
            if progress:
                _report_rows(given, examples.prepared)
                _report_skipped(given.source, examples, config.train.sequence_length)
            return examples
        prepared = prepare(given, tokenizer, progress=progress)
        if progress:
            _report_rows(given, prepared)
        return prepared

    def named(split: Split, given: Mapping[str, str]) -> dict[str, Corpus]:
        return {
            name: load(whole.model_copy(update={"source": source}), split)
            for name, source in given.items()
        }

    divided = data.model_copy(update={"validation_fraction": 0.0}) if data.validation else data
    return Sources(
        {name: load(given, *training) for name, given in divided.sources.items()},
        named("validation", data.validation),
        named("test", data.test),
        tokenizer.digest,
    )


def _report_rows(given: DataConfig, prepared: Prepared) -> None:
    for line in prepared.meta.rows.lines(given.source, given.text_field):
        _print(line)


def _report_skipped(source: str, examples: Examples, length: int) -> None:
    parts = [part for split in SPLITS if (part := examples.part(split)) is not None]
    left = sum(count_too_long(part, length) for part in parts)
    if left:
        total = sum(len(part.sequences) for part in parts)
        _print(
            f"{source}: {left:,} of {total:,} examples are skipped: they are longer than "
            f"train.sequence_length={length}"
        )


def _print(line: str) -> None:
    print(f"megapipe: {line}", file=sys.stderr, flush=True)
