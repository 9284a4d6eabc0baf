"""Bytes that a layer's experts hold for one piece, and what is beside them. No torch.

With a capacity they are those of the most rows that experts can get.
"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.dtypes import DTYPE_BYTES
from megapipe.layers.moe_specs import most_rows
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.moe import GATES, routing_of
from megapipe.model.gpt.parameters import known
from megapipe.model.interface import Sizes

CHOICE, PLACE = 2, 8
"""Bytes of a choice (int16), and of its place in an order (int64)."""


def mixture_saved(model: ModelConfig, sizes: Sizes) -> Iterator[tuple[str, int]]:
    """Storages from F to I, besides the input, with their bytes."""
    moe, size, high = model.moe, DTYPE_BYTES[model.dtype], max(DTYPE_BYTES[model.dtype], 4)
    tokens = sizes.sequence * sizes.rows
    choices, up = tokens * moe.top_k, 2 if model.gated else 1
    rows = most_rows(routing_of(moe), sizes.rows, sizes.sequence)
    yield "up of experts", rows * known(moe.ffn) * up * size
    yield "logits", tokens * known(moe.experts) * high
    yield "choice", choices * CHOICE
    yield "order", choices * PLACE
    yield "rows of choices", choices * PLACE
    if moe.shared is None:
        return
    yield "up", tokens * moe.shared * up * size
    yield "inner", tokens * moe.shared * size
    if gates := GATES[moe.shared_gate]:
        yield "gate", tokens * gates * size
        for name in ("output", "output of experts")[:gates]:
            yield name, tokens * model.hidden * size


def mixture_queued(model: ModelConfig, sizes: Sizes, *, shared: bool) -> int:
    """Bytes that wait for W. `shared`: the gradient of the layer's output is among others already
    where it is kept."""
    moe, size, high = model.moe, DTYPE_BYTES[model.dtype], max(DTYPE_BYTES[model.dtype], 4)
    tokens, h, up = sizes.sequence * sizes.rows, model.hidden, 2 if model.gated else 1
    rows = most_rows(routing_of(moe), sizes.rows, sizes.sequence)
    ffn = known(moe.ffn)
    found = rows * (size * (2 * h + ffn + up * ffn) + high)
    found += tokens * (h * size + known(moe.experts) * high)
    if moe.shared is not None:
        gates = GATES[moe.shared_gate]
        output = 0 if shared and not gates else h
        found += tokens * size * (moe.shared * (1 + up) + output + gates)
    return found
