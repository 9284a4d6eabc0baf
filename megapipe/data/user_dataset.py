"""A user-defined data set: ``data.source=module:name``.

The user's function is called in every process, once for each split, with the arguments of
:data:`ARGUMENTS` that its signature accepts. The function returns a data set with len() and [i].
Samples are read when a step needs them; nothing is copied or cached. A sample is token ids [L+1],
or a tuple of tokens, labels and mask, [L] each, where L is ``train.sequence_length``.
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
"""Arguments of the user-defined function. `split`: ``train``, ``validation``, or ``test`` for
``data.test``; `vocab_size`: the model's vocabulary size, the upper limit of ids; `tokenizer`: a
:class:`~megapipe.data.tokenizer.Tokenizer`; `seed`: ``run.seed``."""
OF_TEXTS = ("validation_fraction", "fim_rate")
"""Configuration keys of ``data`` that apply to texts and token files, not to user data sets."""
_PROBES = 16
"""Number of samples of a split that its digest covers."""


def load(source: str, error: type[MegapipeError]) -> UserCode:
    """Return the user's function or class that `source` names. Raises `error` if it is missing,
    requires an argument outside :data:`ARGUMENTS`, or does not accept ``split``."""
    code = UserCode(source, what="data.source=", error=error)
    code.check(ARGUMENTS)
    if not code.takes_all and "split" not in code.parameters():
        raise code.problem(
            "the function has no parameter split (train or validation), so validation samples "
            "would be trained on"
        )
    return code


class UserSplit:
    """One split of a user-defined data set: `samples`, which the user's function `code` returned.

    Raises :class:`DataError` if the split has no length, or no samples.
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
        """Return sample `index`, of `sequence_length` positions; ids are not checked.

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

    def describe_position(self, index: int, at: int, *, label: bool) -> str:
        """Describe, for an error, the input at position `at` of sample `index`, or the label."""
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
        """Return the SHA-256 of the number of samples, and of some samples across the split."""
        found = hashlib.sha256(str(len(self)).encode())
        for index in np.unique(np.linspace(0, len(self) - 1, _PROBES).astype(int)):
            for values in self.labelled(int(index))[:3]:
                found.update(values.tobytes())
        return found.digest()


@dataclass(frozen=True)
class UserDataset:
    """The splits of a user-defined data set that a run needs.

    Attributes:
        content: SHA-256, in hex, of the length and a few samples of each split.
    """

    parts: Mapping[Split, UserSplit]
    content: str

    @property
    def digest(self) -> str:
        """Equal to `content`, as the data that the user's code reads is not known."""
        return self.content

    @property
    def entropy(self) -> None:
        """None, as the unigram entropy is unknown without reading all samples."""

    def part(self, split: Split) -> UserSplit | None:
        """Return the samples of a split; None if it was not loaded."""
        return self.parts.get(split)


def own_data(
    config: Config, source: str, tokenizer: Tokenizer, splits: Sequence[Split]
) -> UserDataset:
    """Load `splits` of the user-defined data set `source`, for a resolved configuration.

    Raises :class:`DataError` if the user's code fails, or one of the inspected samples is wrong.
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
