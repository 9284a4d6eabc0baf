"""Perplexity and bits per byte of texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megapipe.errors import DataError
from megapipe.evaluate.scoring import ScoredRow, scores
from megapipe.evaluate.texts import Document
from megapipe.evaluate.windows import windows
from megapipe.inference.model import Model
from megapipe.text import count_noun


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts texts."""

    loss: float
    """Mean loss over the scored tokens, in nats."""
    perplexity: float
    """exp(loss); infinite if the number is too large for a float."""
    bits_per_byte: float | None
    """Total loss in bits, per byte of the texts in UTF-8; None if the texts have no bytes."""
    tokens: int
    """Number of tokens that were scored."""
    bytes: int
    documents: int
    context: int
    stride: int

    def describe(self) -> str:
        """Return all results on one line."""
        bits = (
            "no text" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f} bits per byte"
        )
        return (
            f"perplexity {self.perplexity:.4f} | {self.loss:.6f} nats per token | {bits} | "
            f"{count_noun(self.tokens, 'token')}, {count_noun(self.bytes, 'byte')}, "
            f"{count_noun(self.documents, 'document')} | "
            f"context {self.context:,}, stride {self.stride:,}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return all results as a mapping, by name; None stands for an infinite perplexity."""
        found = asdict(self)
        return found if math.isfinite(self.perplexity) else {**found, "perplexity": None}


def measure(
    model: Model,
    documents: Iterable[Document],
    *,
    stride: int | None = None,
    unconditioned: bool = True,
    batch: int = 8,
) -> Perplexity:
    """Return the perplexity of the documents. Each token is scored once, given the earlier tokens
    of its document that are in the same window.

    Args:
        stride: tokens between the starts of successive windows (default: the model's context).
        unconditioned: whether to score a document's first token too, given only the start tokens
            with which the model's texts begin. Otherwise that token is only context.

    Raises:
        DataError: there is nothing to score, or an id is not in the model's vocabulary.
        NumericError: a log-likelihood is NaN.
    """
    start = model.source.start if unconditioned else ()
    context = model.source.context
    stride = context if stride is None else stride
    count = nbytes = 0

    def rows() -> Iterator[ScoredRow]:
        nonlocal count, nbytes
        for document in documents:
            count, nbytes = count + 1, nbytes + document.bytes
            ids: Sequence[int] = [*start, *document.ids]
            yield from windows(ids, first=max(len(start), 1), context=context, stride=stride)

    sums, tokens = [], 0
    for score in scores(model, rows(), batch=batch):
        sums.append(float(np.sum(score.likelihoods)))
        tokens += len(score.likelihoods)
    if not tokens:
        raise DataError(
            f"{count_noun(count, 'document')} without a token to score: expected some text"
        )
    nats = -math.fsum(sums)
    loss = nats / tokens
    return Perplexity(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=nats / math.log(2) / nbytes if nbytes else None,
        tokens=tokens,
        bytes=nbytes,
        documents=count,
        context=context,
        stride=stride,
    )
