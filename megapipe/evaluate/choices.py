"""Multiple choice by log-likelihood: the answer is the choice that is most likely to follow."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.data.corpus.row_count import RowCount
from megapipe.data.tokenizer import Tokenizer
from megapipe.errors import DataError
from megapipe.evaluate.scoring import Score, ScoredRow, scores
from megapipe.inference.model import Model
from megapipe.words import count_noun

PROMPTS = ("prompt", "question")
"""Fields that may have what is given."""


@dataclass(frozen=True)
class Question:
    """A prompt, what may follow it, and which of that is right."""

    prompt: str
    choices: tuple[str, ...]
    answer: int
    """From 0."""
    place: str
    """Where it was found, for messages."""


@dataclass(frozen=True)
class Accuracy:
    """A share of right answers, and its standard error."""

    value: float
    stderr: float | None
    """Of the mean, from the sample; None for a single question."""
    ties: int
    """Questions whose best value several choices share: the first of them was taken."""

    @classmethod
    def of(cls, right: Sequence[bool], ties: int) -> Accuracy:
        """The share of `right` answers."""
        n = len(right)
        mean = sum(right) / n
        error = math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None
        return cls(mean, error, ties)


@dataclass(frozen=True)
class MultipleChoice:
    """How often a model prefers the right choice."""

    acc: Accuracy
    """By the log-likelihood of a choice."""
    acc_norm: Accuracy
    """The same by the bytes of the choice in UTF-8."""
    acc_tokens: Accuracy
    """The same by its tokens."""
    questions: int
    cut: int
    """Questions of which the model saw the end alone."""

    def describe(self) -> str:
        """All of it in a line."""
        names = {"acc": self.acc, "acc_norm": self.acc_norm, "acc_tokens": self.acc_tokens}
        parts = []
        for name, share in names.items():
            error = "" if share.stderr is None else f" +- {share.stderr:.4f}"
            ties = f" ({count_noun(share.ties, 'tie')}, the first taken)" if share.ties else ""
            parts.append(f"{name} {share.value:.4f}{error}{ties}")
        cut = f", {self.cut} longer than the context" if self.cut else ""
        return " | ".join([*parts, f"{count_noun(self.questions, 'question')}{cut}"])

    def as_json(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)


def read_questions(path: Path, count: RowCount) -> Iterator[Question]:
    """Yield the questions of a JSONL file: {"prompt" or "question", "choices", "answer"}. Lone
    surrogates are replaced, and counted in `count`.

    Raises DataError, with the line, for what is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text") from None
    empty = True
    for number, line in enumerate(lines, 1):
        if line.strip():
            empty = False
            question = _question(line, f"{path}: line {number}")
            yield replace(
                question,
                prompt=count.replace_surrogates(question.prompt),
                choices=tuple(map(count.replace_surrogates, question.choices)),
            )
    if empty:
        raise DataError(f"{path}: it has no questions")


def _question(line: str, place: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: no JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected an object with a prompt, choices and an answer")
    prompt = next((row[name] for name in PROMPTS if row.get(name) is not None), None)
    choices, answer = row.get("choices"), row.get("answer")
    if not isinstance(prompt, str):
        raise DataError(f"{place}: expected a text as {' or '.join(map(repr, PROMPTS))}")
    if not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices):
        raise DataError(f"{place}: expected 'choices', a list of texts that are not empty")
    if len(choices) < 2:
        raise DataError(f"{place}: {len(choices)} choices: expected two at least")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise DataError(
            f"{place}: 'answer' is {json.dumps(answer)}: expected the number of a choice, 0 to "
            f"{len(choices) - 1}"
        )
    return Question(prompt, tuple(choices), answer, place)


def pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokens of a text and of what follows it, as they are in both together.

    White space at the end of `context` is counted to what follows: most tokenizers join it with the
    word behind it. So lm-evaluation-harness divides them, too.
    """
    bare = context.rstrip()
    whole = tokenizer.encode(context + continuation).tolist()
    before = len(tokenizer.encode(bare))
    return whole[:before], whole[before:]


def row_of(
    start: Sequence[int], context: Sequence[int], continuation: Sequence[int], most: int
) -> tuple[ScoredRow, bool]:
    """A row that scores `continuation` given `start` and `context`; and whether the beginning was
    cut off so that the model reads `most` tokens. `continuation` fits."""
    ids = [*start, *context, *continuation]
    kept = ids[-(most + 1) :]
    return ScoredRow(kept, len(kept) - len(continuation)), len(kept) < len(ids)


def answer(
    model: Model,
    questions: Iterable[Question],
    *,
    delimiter: str = " ",
    truncate: bool = False,
    batch: int = 8,
) -> MultipleChoice:
    """Score each choice as what follows its prompt and `delimiter`.

    With `truncate` prompts that are longer than the model's context lose their beginnings.

    Raises:
        DataError: a choice has no tokens of its own, or does not fit into the context; a prompt
            does not, without `truncate`.
        NumericError: a log-likelihood is NaN.
    """
    asked: list[Question] = []
    rows: list[ScoredRow] = []
    cut = 0
    for question in questions:
        asked.append(question)
        some = [_row(model, question, delimiter + choice) for choice in question.choices]
        is_cut = any(each for _, each in some)
        if is_cut and not truncate:
            raise DataError(
                f"{question.place}: prompt and choices are longer than the model's context of "
                f"{model.source.context} tokens: expected shorter ones, or --truncate"
            )
        cut += is_cut
        rows += [row for row, _ in some]
    if not asked:
        raise DataError("no questions")
    found = scores(model, rows, batch=batch)
    right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_tokens": []}
    ties = dict.fromkeys(right, 0)
    for question in asked:
        scored = [next(found) for _ in question.choices]
        # choices that are equal tie, however the batches that they were in have rounded
        own = [scored[question.choices.index(choice)] for choice in question.choices]
        for name, values in _values(question, own).items():
            right[name].append(int(np.argmax(values)) == question.answer)
            ties[name] += int((values == values.max()).sum() > 1)
    shares = {name: Accuracy.of(each, ties[name]) for name, each in right.items()}
    return MultipleChoice(**shares, questions=len(asked), cut=cut)


def _row(model: Model, question: Question, continuation: str) -> tuple[ScoredRow, bool]:
    source = model.source
    context, following = pair(source.tokenizer, question.prompt, continuation)
    if not 0 < len(following) <= source.context:
        what = "has no token of its own" if not following else f"has {len(following)} tokens"
        raise DataError(
            f"{question.place}: choice {continuation!r} {what}: expected 1 to {source.context}, "
            "the model's context"
        )
    start = source.opening if context else source.start
    return row_of(start, context, following, source.context)


def _values(question: Question, found: Sequence[Score]) -> dict[str, Any]:
    """Values of the choices, of which the largest is taken, by the names of the shares."""
    totals = np.array([score.total for score in found])
    nbytes = np.array([len(c.encode(errors="replace")) for c in question.choices])
    tokens = np.array([len(score.likelihoods) for score in found])
    return {"acc": totals, "acc_norm": totals / nbytes, "acc_tokens": totals / tokens}
