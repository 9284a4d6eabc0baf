"""Log-likelihoods of tokens.

Rows of tokens are read in batches and padded at their ends. If the vocabulary is split over tp, the
logits are not gathered. Instead each rank sends three numbers per token for the log-likelihood
(:mod:`megapipe.layers.cross_entropy`), and its largest logit with the token's id to find the most
probable token. In a pipeline, a stage continues with the next batch while later stages compute.
Every few batches the results are sent to all ranks.
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
"""Number of batches that enter the pipeline before their results are sent to all ranks."""
T = TypeVar("T")


class ScoredRow(NamedTuple):
    """Sequence of tokens, scored from index `first` on: each token given all earlier ones.

    The model reads all tokens except the last. They must fit into its context.
    """

    ids: Sequence[int]
    first: int
    """Index of the first scored token; at least 1, because a scored token needs one before it."""


@dataclass(frozen=True)
class Score:
    """Log-likelihoods of the scored tokens of a row."""

    likelihoods: npt.NDArray[np.float64]
    """Natural logarithms of the probabilities of the scored tokens, [n]."""
    greedy: bool
    """Whether each scored token is the most probable one; ties go to the smallest id."""

    @property
    def total(self) -> float:
        """Sum of the log-likelihoods, in nats."""
        return float(self.likelihoods.sum())


def scores(model: Model, rows: Iterable[ScoredRow], *, batch: int) -> Iterator[Score]:
    """Yield the score of each row, in order, on every rank. `batch` rows are read at a time.

    All ranks pass the same rows.

    Raises:
        DataError: an id is not in the model's vocabulary.
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
    """Yield lists of `size` things each; the last list may be shorter."""
    left = iter(things)
    while some := list(islice(left, size)):
        yield some


def _read(model: Model, rows: Sequence[ScoredRow]) -> tuple[Tensor, Tensor] | None:
    """Return two tensors [n] over the scored tokens of all rows: the log-likelihoods; and 1 where
    the token is the most probable one, else 0. Return None on ranks without the last stage."""
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
    """Return the id of the largest logit, the smallest id if tied: [s, b, V or V/tp] -> [s, b].

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
