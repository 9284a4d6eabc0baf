"""A data set of the user's: ``data.source=module:name``.

The function is called in every process, once for each split, with those of :data:`ARGUMENTS` that
its signature takes. It returns a data set with len() and [i]; samples are read when a step needs
them, and nothing is copied or cached. A sample is token ids [L+1], or a tuple of tokens, labels and
mask [L] each, where L is ``train.sequence_length``.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megapipe.config.config import Config
from megapipe.data.dataset import Sample, Split
from megapipe.data.tokenizer import Tokenizer
from megapipe.errors import DataError, MegapipeError
from megapipe.util.user_code import FAILURES, UserCode

ARGUMENTS = ("split", "sequence_length", "vocab_size", "tokenizer", "seed")
"""`split` is ``train``, ``validation``, or ``test`` for ``data.test``; `vocab_size` that of the
model, above all token ids; `tokenizer` a :class:`~megapipe.data.tokenizer.Tokenizer`; `seed` is
``run.seed``."""
OF_TEXTS = ("validation_fraction", "fim_rate")
"""Keys of ``data`` that only texts and token files have a use for."""
_PROBES = 16
"""Samples of a split that its digest covers."""


def load(source: str, error: type[MegapipeError]) -> UserCode:
    """The code that `source` names. Raises `error` if there is none, or for wrong arguments."""
    code = UserCode(source, what="data.source=", error=error)
    code.check(ARGUMENTS)
    if not code.takes_all and "split" not in code.parameters():
        raise code.problem(
            "it does not take split, which is train or validation: what is held out would be "
            "trained on"
        )
    return code


class UserSplit:
    """One split, training or validation, as `code` has returned it.

    Raises :class:`DataError` if it has no length, or no samples.
    """

    def __init__(self, code: UserCode, samples: Any, split: str, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self._code = code
        self._samples = samples
        self._split = split
        if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
            raise code.problem(
                f"it returned {type(samples).__name__} for split {split}: expected a data set with "
                "len() and [i]"
            )
        try:
            self._length = len(samples)
        except FAILURES as error:
            raise code.failed(error, f"len() of split {split}: ") from error
        if self._length == 0:
            raise code.problem(f"its split {split} is empty: expected one sample or more")

    def __len__(self) -> int:
        return self._length

    def labelled(self, index: int) -> Sample:
        """Sample `index`, of `sequence_length` positions; ids may be outside the vocabulary.

        Raises :class:`DataError` if the user's code fails, or returns other shapes or types.
        """
        try:
            sample = self._samples[index]
            several = isinstance(sample, tuple)
            parts = [np.asarray(part) for part in (sample if several else (sample,))]
        except FAILURES as error:
            raise self._code.failed(error, f"{self._name(index)}: ") from error
        if not several:
            self._check(index, "token ids", parts[0], self.sequence_length + 1, "iu")
            return Sample.of_window(parts[0].astype(np.int64), self.sequence_length)
        if len(parts) != 3:
            raise self._code.problem(
                f"{self._name(index)} is a tuple of {len(parts)}: expected tokens, labels and mask"
            )
        tokens, labels, mask = parts
        for what, values, kinds in (
            ("tokens", tokens, "iu"),
            ("labels", labels, "iu"),
            ("mask", mask, "b"),
        ):
            self._check(index, what, values, self.sequence_length, kinds)
        return Sample(tokens.astype(np.int64), labels.astype(np.int64), mask)

    def place(self, index: int, at: int, *, label: bool) -> str:
        """The place of token or label `at` of a sample, for errors."""
        what = "label" if label else "position"
        return f"{what} {at} of {self._name(index)} of data.source={self._code.spec}"

    def _name(self, index: int) -> str:
        return f"sample {index} of split {self._split}"

    def _check(
        self, index: int, what: str, values: npt.NDArray[Any], length: int, kinds: str
    ) -> None:
        if values.shape != (length,) or values.dtype.kind not in kinds:
            more = " and one more" if length > self.sequence_length else ""
            raise self._code.problem(
                f"{self._name(index)} has {what} {values.dtype} {list(values.shape)}: expected "
                f"{'booleans' if kinds == 'b' else 'integers'} [{length}], "
                f"train.sequence_length={self.sequence_length}{more}"
            )

    def digest(self) -> bytes:
        """SHA-256 of the number of samples and of some samples, the first and the last included."""
        found = hashlib.sha256(str(len(self)).encode())
        for index in np.unique(np.linspace(0, len(self) - 1, _PROBES).astype(int)):
            for values in self.labelled(int(index))[:3]:
                found.update(values.tobytes())
        return found.digest()


@dataclass(frozen=True)
class UserDataset:
    """The splits that a run needs.

    Attributes:
        content: SHA-256, in hex, of the lengths and a few samples of each.
    """

    parts: Mapping[Split, UserSplit]
    content: str

    @property
    def digest(self) -> str:
        """The same as `content`: what the user's code reads is not known."""
        return self.content

    @property
    def entropy(self) -> None:
        """None: the unigram entropy is not known without reading all samples."""

    def part(self, split: Split) -> UserSplit | None:
        """The samples of a split."""
        return self.parts.get(split)


def own_data(
    config: Config, source: str, tokenizer: Tokenizer, splits: Sequence[Split]
) -> UserDataset:
    """The data set that `source` names, for a resolved configuration; it is asked for `splits`.

    Raises :class:`DataError` for whatever is wrong with the code or with the samples looked at.
    """
    code = load(source, DataError)

    def make(split: Split) -> UserSplit:
        given = {
            "split": split,
            "sequence_length": config.train.sequence_length,
            "vocab_size": config.model.vocab_size or tokenizer.vocab_size,
            "tokenizer": tokenizer,
            "seed": config.run.seed,
        }
        samples = code.call(given, ARGUMENTS)
        return UserSplit(code, samples, split, config.train.sequence_length)

    parts = {split: make(split) for split in splits}
    content = hashlib.sha256(b"".join(part.digest() for part in parts.values())).hexdigest()
    return UserDataset(parts, content)
