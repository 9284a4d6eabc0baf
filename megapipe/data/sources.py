"""The corpora of a run: what it is trained on, validated on and tested on, by the user's names."""

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
from megapipe.data.fill_in_the_middle import marks_of
from megapipe.data.given import TokenFileCorpus, given_tokens, is_token_file
from megapipe.data.own import own_data
from megapipe.data.prepare import Prepared, prepare
from megapipe.data.remote import fetched
from megapipe.data.supervised import Examples, count_too_long, prepare_examples
from megapipe.data.tokenizer import Tokenizer
from megapipe.util.user_code import is_source


class HeldOut(NamedTuple):
    """A set that losses are computed on."""

    name: str
    """Of the user's, or :data:`ONLY`."""
    split: Split
    part: Stream | Dataset


@dataclass(frozen=True)
class Sources:
    """All corpora of a run.

    Attributes:
        training: those trained on, by name; their own held-out parts are validated on.
        validation: those of ``data.validation``, in the place of these parts.
        test: those of ``data.test``.
        tokenizer: SHA-256, in hex, of what decides which ids texts and marks have.
    """

    training: Mapping[str, Corpus]
    validation: Mapping[str, Corpus]
    test: Mapping[str, Corpus]
    tokenizer: str

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of what decides what is trained on."""
        return self._of_training(lambda corpus: corpus.digest)

    @property
    def content(self) -> str:
        """SHA-256, in hex, of what stands for it, wherever the files lie."""
        return self._of_training(lambda corpus: corpus.content)

    @property
    def everything(self) -> str:
        """The same of what is validated and tested on too."""
        rest = [corpus.content for some in (self.validation, self.test) for corpus in some.values()]
        return hashlib.sha256(json.dumps([self.content, *rest]).encode()).hexdigest()

    @property
    def files(self) -> list[str | None]:
        """SHA-256, in hex, for all bytes of each file of the user's tokens and indices, of which
        `everything` has but some; None of one without checksums."""
        some = (self.training, self.validation, self.test)
        every = chain.from_iterable(corpora.values() for corpora in some)
        given = (corpus.file for corpus in every if isinstance(corpus, TokenFileCorpus))
        return [content for file in given for content in file.contents]

    def is_like(self, everything: str, files: Sequence[str | None]) -> bool:
        """Whether another process, which has these, has the same data; where one of the two has no
        checksums of a file, `everything` has to do."""
        return self.everything == everything and all(
            mine == theirs or None in (mine, theirs)
            for mine, theirs in zip(self.files, files, strict=True)
        )

    @property
    def entropy(self) -> float | None:
        """Unigram entropy of a single source, in nats per token, where it is known."""
        return self.training[ONLY].entropy if ONLY in self.training else None

    def held_out(self) -> Iterator[HeldOut]:
        """The sets to validate and to test on. Raises DataError for a damaged one."""
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
    """Whether samples are read in a thread of their own (``data.prefetch``)."""
    if data.prefetch is not None:
        return data.prefetch
    return not any(is_source(source.source) for source in data.sources.values())


def load_sources(config: Config, tokenizer: Tokenizer, *, progress: bool = True) -> Sources:
    """The corpora of a resolved configuration; texts are tokenized, or taken from the cache.

    Raises :class:`DataError` for whatever is wrong with one.
    """
    data = config.data
    if data.fim_rate:
        marks_of(data, tokenizer)  # before texts are tokenized for nothing
    plain = {"validation_fraction": 0.0, "split": None, "subset": None, "dataset_split": None}
    whole = data.model_copy(update=plain)
    training: list[Split] = ["train"] if data.validation else ["train", "validation"]

    def load(given: DataConfig, *splits: Split) -> Corpus:
        given = fetched(given, progress=progress)
        if is_source(given.source):
            return own_data(config, given.source, tokenizer, splits)
        if is_token_file(given.source):
            return given_tokens(given)
        if data.samples == "supervised":
            examples = prepare_examples(given, tokenizer, progress=progress)
            if progress:
                _tell_rows(given, examples.prepared)
                _tell_left_out(given.source, examples, config.train.sequence_length)
            return examples
        prepared = prepare(given, tokenizer, progress=progress)
        if progress:
            _tell_rows(given, prepared)
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


def _tell_rows(given: DataConfig, prepared: Prepared) -> None:
    for line in prepared.meta.rows.lines(given.source, given.text_field):
        _tell(line)


def _tell_left_out(source: str, examples: Examples, length: int) -> None:
    parts = [part for split in SPLITS if (part := examples.part(split)) is not None]
    left = sum(count_too_long(part, length) for part in parts)
    if left:
        total = sum(len(part.sequences) for part in parts)
        _tell(
            f"{source}: {left:,} of {total:,} examples are left out, as they are longer than "
            f"train.sequence_length={length}"
        )


def _tell(line: str) -> None:
    print(f"megapipe: {line}", file=sys.stderr, flush=True)
