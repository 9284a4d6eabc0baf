"""Bytes that a layer's experts hold for one piece, and what is beside them. No torch.

With a capacity they are those of the most rows that experts can get. Otherwise experts on several
ranks have as many as where all are chosen evenly, or so many times as many as is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.dtypes import DTYPE_BYTES
from megapipe.layers.moe_specs import Routing, most_rows, padded_rows
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.moe import GATES, routing_of
from megapipe.model.gpt.parameters import known
from megapipe.model.interface import Sizes

CHOICE, PLACE, COUNT = 2, 8, 8
"""Bytes of a choice (int16), of its place in an order, and of a count (int64)."""


def high_bytes(model: ModelConfig) -> int:
    """Bytes of a logit, a score or a weight."""
    return max(DTYPE_BYTES[model.dtype], 4)


def tokens_of(sizes: Sizes) -> int:
    """Tokens that a rank routes."""
    return sizes.sequence * sizes.rows // (sizes.tp if sizes.sequence_parallel else 1)


def rows_of(routing: Routing, sizes: Sizes) -> int:
    """Rows of its experts, with a capacity at most, or at an imbalance; with the empty ones, where
    there are some."""
    if sizes.dispatch.padded is not None:
        given = tokens_of(sizes), sizes.rows, sizes.dispatch.padded
        return sizes.etp * padded_rows(routing, *given)
    parts = sizes.cp * (sizes.tp if sizes.sequence_parallel else 1)
    shared_by = sizes.ep * sizes.etp
    sequences, length = sizes.rows * max(1, shared_by // parts), sizes.sequence * sizes.cp
    shared = sizes.ep, sizes.etp, sizes.imbalance
    return most_rows(routing, tokens_of(sizes), sequences, length, *shared)


def experts_saved(model: ModelConfig, sizes: Sizes, layer: int) -> Iterator[tuple[str, int]]:
    """Storages of a layer's experts from F to I, besides the input, with their bytes."""
    moe, size, routing = model.moe, DTYPE_BYTES[model.dtype], routing_of(model.moe, layer)
    tokens = tokens_of(sizes)
    choices, up = tokens * moe.top_k, 2 if model.gated else 1
    rows = rows_of(routing, sizes)
    yield "up of experts", rows * known(moe.ffn) // sizes.etp * up * size
    yield "logits", tokens * routing.experts * high_bytes(model)
    yield "choice", choices * CHOICE
    if routing.scope != "step":
        scopes = sizes.rows if routing.scope == "sequence" else 1
        yield "counts", scopes * routing.experts * COUNT
    yield "order", (choices if sizes.dispatch.padded is None else rows // sizes.etp) * PLACE
    yield "rows of choices", choices * PLACE
    if sizes.ep * sizes.etp > 1:
        yield "arrived", rows * model.hidden * size
        yield "weights", rows * high_bytes(model)
        yield "order of arrival", rows * PLACE


def beside_experts_saved(model: ModelConfig, sizes: Sizes) -> Iterator[tuple[str, int]]:
    """Those of the MLP beside them, and of its gate."""
    moe, size, tokens = model.moe, DTYPE_BYTES[model.dtype], tokens_of(sizes)
    if moe.shared is None:
        return
    inner = sizes.sequence * sizes.rows * moe.shared // sizes.tp
    yield "up", inner * (2 if model.gated else 1) * size
    yield "output", inner * size
    if gates := GATES[moe.shared_gate]:
        yield "gate", tokens * gates * size
        for name in ("output of the MLP", "output of experts")[:gates]:
            yield name, tokens * model.hidden * size


def mixture_queued(model: ModelConfig, sizes: Sizes, layer: int, *, shared: bool) -> int:
    """Bytes of a layer that wait for W. `shared`: the gradient of its output is among others
    already where it is kept."""
    moe, size, h = model.moe, DTYPE_BYTES[model.dtype], model.hidden
    tokens, up = tokens_of(sizes), 2 if model.gated else 1
    found = experts_queued(model, sizes, layer) + tokens * h * size
    if moe.shared is not None:
        gates = GATES[moe.shared_gate]
        output = 0 if shared and not gates else h
        found += sizes.sequence * sizes.rows * moe.shared // sizes.tp * (1 + up) * size
        found += tokens * size * (output + gates)
    return found


def experts_queued(model: ModelConfig, sizes: Sizes, layer: int) -> int:
    """Those of its experts and their router, but for the input."""
    moe, size, high = model.moe, DTYPE_BYTES[model.dtype], high_bytes(model)
    rows, ffn = rows_of(routing_of(moe, layer), sizes), known(moe.ffn) // sizes.etp
    wide = ffn * (2 if model.gated else 1)
    found = rows * (size * (2 * model.hidden + ffn + wide) + high)
    return found + tokens_of(sizes) * moe.experts_of(layer) * high
