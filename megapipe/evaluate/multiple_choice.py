"""Multiple choice by log-likelihood: the answer is the most likely continuation."""

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
from megapipe.text import count_noun

PROMPTS = ("prompt", "question")
"""Fields of a question's JSON object that may hold the prompt."""


@dataclass(frozen=True)
class Question:
    """A prompt, its possible continuations, and the index of the right one."""

    prompt: str
    choices: tuple[str, ...]
    answer: int
    """Index of the right choice, from 0."""
    location: str
    """File and line of the question, for messages."""


@dataclass(frozen=True)
class Accuracy:
    """Fraction of questions answered correctly, and its standard error."""

    value: float
    stderr: float | None
    """Standard error of the mean, estimated from the questions; None for a single question."""
    ties: int
    """Number of questions with several best choices; the first of them is taken."""

    @classmethod
    def of(cls, right: Sequence[bool], ties: int) -> Accuracy:
        """Return the accuracy over questions. `right`: whether each was answered correctly."""
        n = len(right)
        mean = sum(right) / n
        error = math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None
        return cls(mean, error, ties)


@dataclass(frozen=True)
class MultipleChoice:
    """Accuracy of a model on multiple-choice questions, by three metrics."""

    acc: Accuracy
    """Accuracy by log-likelihood of the choice."""
    acc_norm: Accuracy
    """Accuracy by log-likelihood per UTF-8 byte of the choice."""
    acc_tokens: Accuracy
    """Accuracy by log-likelihood per token of the choice."""
    questions: int
    cut: int
    """Number of questions whose prompt was truncated to fit the context."""

    def describe(self) -> str:
        """Return all results on one line."""
        names = {"acc": self.acc, "acc_norm": self.acc_norm, "acc_tokens": self.acc_tokens}
        parts = []
        for name, share in names.items():
            error = "" if share.stderr is None else f" +- {share.stderr:.4f}"
            ties = f" ({count_noun(share.ties, 'tie')}, the first taken)" if share.ties else ""
            parts.append(f"{name} {share.value:.4f}{error}{ties}")
        cut = f", {self.cut} longer than the context" if self.cut else ""
        return " | ".join([*parts, f"{count_noun(self.questions, 'question')}{cut}"])

    def as_json(self) -> dict[str, Any]:
        """Return all results by name."""
        return asdict(self)


def read_questions(path: Path, count: RowCount) -> Iterator[Question]:
    """Yield the questions of a JSONL file: {"prompt" or "question", "choices", "answer"}. Lone
    surrogates are replaced, and counted in `count`.

    Raises DataError with the line number if a line is not a question.
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


def _question(line: str, location: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{location}: no JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{location}: expected an object with a prompt, choices and an answer")
    prompt = next((row[name] for name in PROMPTS if row.get(name) is not None), None)
    choices, answer = row.get("choices"), row.get("answer")
    if not isinstance(prompt, str):
        raise DataError(f"{location}: expected a text as {' or '.join(map(repr, PROMPTS))}")
    if not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices):
        raise DataError(f"{location}: expected 'choices', a list of texts that are not empty")
    if len(choices) < 2:
        raise DataError(f"{location}: {len(choices)} choices: expected two at least")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise DataError(
            f"{location}: 'answer' is {json.dumps(answer)}: expected the number of a choice, 0 to "
            f"{len(choices) - 1}"
        )
    return Question(prompt, tuple(choices), answer, location)


def pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokenize `context` and `continuation` together, and return the tokens of each.

    White space at the end of `context` goes to the continuation, because most tokenizers join it
    with the next word. lm-evaluation-harness splits in the same way.
    """
    bare = context.rstrip()
    whole = tokenizer.encode(context + continuation).tolist()
    before = len(tokenizer.encode(bare))
    return whole[:before], whole[before:]


def row_of(
    start: Sequence[int], context: Sequence[int], continuation: Sequence[int], most: int
) -> tuple[ScoredRow, bool]:
    """Return a row that scores `continuation` after `start` and `context`, and whether the row was
    truncated. If the model would read more than `most` tokens, the row loses its beginning.
    `continuation` must fit into `most` tokens."""
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
    """Return how often the model prefers the right choice. Each choice is scored as the
    continuation of its prompt and `delimiter`.

    With `truncate`, a prompt that does not fit into the model's context loses its beginning.

    Raises:
        DataError: a choice has no tokens of its own, or does not fit into the context; or a prompt
            does not fit, and `truncate` is not set.
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
                f"{question.location}: prompt and choices are longer than the model's context of "
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
        # equal choices tie, even if batches round them differently
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
            f"{question.location}: choice {continuation!r} {what}: expected 1 to {source.context}, "
            "the model's context"
        )
    start = source.opening if context else source.start
    return row_of(start, context, following, source.context)


def _values(question: Question, found: Sequence[Score]) -> dict[str, Any]:
    """Map the name of each metric to its scores, one per choice. The largest score wins."""
    totals = np.array([score.total for score in found])
    nbytes = np.array([len(c.encode(errors="replace")) for c in question.choices])
    tokens = np.array([len(score.likelihoods) for score in found])
    return {"acc": totals, "acc_norm": totals / nbytes, "acc_tokens": totals / tokens}
