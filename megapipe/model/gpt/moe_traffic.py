"""Bytes to experts and back, by which a run chooses `experts.dispatch` and `chunks`. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.dtypes import DTYPE_BYTES, main_bytes
from megapipe.layers.moe_specs import padded_rows, wire_bytes
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.moe import mixture_parameters, routing_of
from megapipe.model.interface import Conditions, TokenTraffic
from megapipe.model.partition import StageSpec

_CHOICE, _COUNT = 2, 8
"""Bytes of a choice (int16), and of a count (int64)."""


def token_traffic(
    model: ModelConfig, stage: StageSpec, given: Conditions, rows: int, length: int
) -> Iterator[TokenTraffic]:
    """Yield what :meth:`Family.token_traffic` says of a stage."""
    layers = list(filter(model.moe.has_experts, stage.layers))
    if not layers:
        return
    if given.dispatch == "fetch":
        yield from _matrices(model, layers, given)
        return
    if not given.pad:
        counts = sum(map(model.moe.experts_of, layers)) * _COUNT
        yield TokenTraffic("all_gather", "routing", given.ep * given.etp * counts)
    yield from _rows(model, layers, given, rows, length)


def _rows(
    model: ModelConfig, layers: list[int], given: Conditions, rows: int, length: int
) -> Iterator[TokenTraffic]:
    """Tokens on their way to their experts and back, none dropped; or rows that have room for all,
    with those that are empty."""
    moe = model.moe
    tokens = rows * length // (given.cp * given.tp)
    sent = len(layers) * tokens * moe.top_k
    if given.pad:
        sizes = tokens, rows, given.sequence_length
        sent = sum(padded_rows(routing_of(moe, layer), *sizes) for layer in layers)
    sent *= given.etp
    row = wire_bytes(given.codec, model.hidden, DTYPE_BYTES[model.dtype])
    weight = max(DTYPE_BYTES[model.dtype], 4)
    if given.dispatch == "all_gather":
        whole = len(layers) * given.ep * given.etp * tokens
        yield TokenTraffic("all_gather", "F", whole * (row + moe.top_k * (weight + _CHOICE)))
        yield TokenTraffic("all_gather", "I", whole * row)
        yield TokenTraffic("all_to_all", "F", sent * row)
        yield TokenTraffic("all_to_all", "I", sent * (row + weight))
        return
    for what in "FI":  # gradients of the weights come back
        yield TokenTraffic("all_to_all", what, sent * (2 * row + weight))


def _matrices(model: ModelConfig, layers: list[int], given: Conditions) -> Iterator[TokenTraffic]:
    """Matrices of experts on their way to tokens, and gradients on their way home."""
    each = [spec for layer in layers for spec in mixture_parameters(model, layer) if spec.experts]
    numel = sum(spec.local_numel(1, given.ep, given.etp) for spec in each)
    whole = given.ep * given.etp * numel
    for what in "FI":
        yield TokenTraffic("all_gather", what, whole * DTYPE_BYTES[model.dtype])
    if given.lora is None:
        yield TokenTraffic("reduce_scatter", "W", whole * main_bytes(model.dtype))
