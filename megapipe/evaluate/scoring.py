"""Log-likelihoods of tokens.

Rows are read side by side, filled up at their ends. Where the vocabulary is split over tp no rank
gathers the logits: it exchanges three numbers per token for the log-likelihood
(:mod:`megapipe.layers.cross_entropy`), and its largest logit for the most probable token. With a
pipeline a stage goes on with the next batch while the later ones compute; the results travel to all
ranks after some batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import all_gather
from megapipe.errors import DataError, NumericError
from megapipe.inference.model import Model
from megapipe.layers.cross_entropy import vocab_parallel_cross_entropy

BATCHES = 8
"""Batches on their way through the pipeline before their results are exchanged."""
T = TypeVar("T")


class ScoredRow(NamedTuple):
    """Tokens, of which those from `first` on are scored, each given all before it.

    The model reads all but the last one: at most as many as its context has.
    """

    ids: Sequence[int]
    first: int
    """At least 1: a token needs one before it."""


@dataclass(frozen=True)
class Score:
    """Of a row's scored tokens."""

    likelihoods: npt.NDArray[np.float64]
    """Natural logarithms of their probabilities [n]."""
    greedy: bool
    """Each is the most probable one (of several the one with the smallest id)."""

    @property
    def total(self) -> float:
        """Log-likelihood of all of them together, in nats."""
        return float(self.likelihoods.sum())


def scores(model: Model, rows: Iterable[ScoredRow], *, batch: int) -> Iterator[Score]:
    """The score of each row, in order, on every rank; `batch` of them are read side by side.

    All ranks give the same rows.

    Raises:
        DataError: an id that the model does not know.
        NumericError: a log-likelihood is NaN.
    """
    for group in _lists(_lists(rows, batch), BATCHES):
        counts = [len(row.ids) - row.first for some in group for row in some]
        own = [_read(model, some) for some in group]
        total = sum(counts)
        numbers = None
        if model.speaks:
            parts = [part for part in own if part is not None]
            numbers = torch.cat([torch.cat(each) for each in zip(*parts, strict=True)])
        found = model.shared(numbers, 2 * total).numpy()
        if np.isnan(found).any():
            raise NumericError(
                "the model's log-likelihoods are not finite: its weights are damaged or diverged"
            )
        at = 0
        for count in counts:
            greedy = found[total + at : total + at + count]
            yield Score(found[at : at + count].copy(), bool(greedy.all()))
            at += count


def _lists(things: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` things; the last one may be shorter."""
    left = iter(things)
    while some := list(islice(left, size)):
        yield some


def _read(model: Model, rows: Sequence[ScoredRow]) -> tuple[Tensor, Tensor] | None:
    """Log-likelihoods of the scored tokens of some rows, one row after the other [n], and 1 where a
    token is the most probable one [n]; None on ranks that do not have the last stage."""
    longest = max(len(row.ids) for row in rows) - 1
    ids = torch.zeros(len(rows), longest + 1, dtype=torch.int64)
    scored = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.as_tensor(row.ids)
        scored[i, row.first - 1 : len(row.ids) - 1] = True
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= model.vocab_size:
        wrong = least if least < 0 else most
        raise DataError(f"token id {wrong}: the model knows 0 to {model.vocab_size - 1}")
    columns = model.local_logits(model.microbatch(ids[:, :-1]))
    if columns is None:
        return None
    labels = ids[:, 1:].t().to(columns.device)  # [s, b]
    axis, known = model.columns_axis, model.vocab_size
    losses = vocab_parallel_cross_entropy(columns, labels, axis, known)
    best = most_probable(columns, axis, known)
    likelihoods, greedy = (-losses).t().cpu().double(), (best == labels).t().cpu().double()
    return likelihoods[scored], greedy[scored]


def most_probable(columns: Tensor, axis: Axis, vocab_size: int) -> Tensor:
    """The id of the largest logit, of equal ones the smallest id: [s, b, V or V/tp] -> [s, b].

    The result is the same on all ranks of `axis`. Columns from `vocab_size` on are padding.
    """
    offset = axis.index * columns.shape[-1]
    known = min(max(vocab_size - offset, 0), columns.shape[-1])
    if known:
        value, at = columns[..., :known].max(-1)
    else:
        value = columns.new_full(columns.shape[:-1], float("-inf"))
        at = torch.zeros_like(value, dtype=torch.int64)
    if axis.size == 1:
        return at
    values = all_gather(value.unsqueeze(0).contiguous(), axis)  # [tp, s, b]
    ids = all_gather((at + offset).unsqueeze(0).contiguous(), axis)
    first = (values == values.amax(0)).long().argmax(0, keepdim=True)
    return ids.gather(0, first)[0]
