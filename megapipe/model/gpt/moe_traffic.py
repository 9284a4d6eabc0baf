"""Exchanges about the tokens of layers with experts. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megapipe.dtypes import DTYPE_BYTES
from megapipe.layers.policy import Span
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.moe import routing_of
from megapipe.model.gpt.moe_memory import CHOICE, COUNT, high_bytes
from megapipe.model.gpt.parameters import known
from megapipe.model.interface import Conditions, TokenTraffic
from megapipe.model.partition import StageSpec


def routing_traffic(
    model: ModelConfig, stage: StageSpec, given: Conditions, rows: int, length: int
) -> Iterator[TokenTraffic]:
    """About choices, of a piece of `rows` sequences: counts for the balance term, but for one that
    counts those of the last step; with a capacity
    the choices themselves, and the weights if these decide who is dropped; and where experts are
    split, rows for each of them. In the first run of a layer alone."""
    moe, routing = model.moe, routing_of(model.moe)
    layers = sum(map(moe.has_experts, stage.layers))
    counts = layers * known(moe.experts) * COUNT
    if routing.scope != "step":
        scopes = rows if routing.scope == "sequence" else 1
        yield TokenTraffic("sequence", "all_reduce", "routing", layers, scopes * counts)
    yield TokenTraffic("ep", "all_gather", "routing", layers, given.ep * given.etp * counts)
    if moe.capacity is None:
        return
    choices = layers * rows * length * moe.top_k
    yield TokenTraffic("sequence", "all_gather", "routing", layers, choices * CHOICE)
    if moe.drop == "score":
        size = choices * high_bytes(model)
        yield TokenTraffic("sequence", "all_gather", "routing", layers, size)


def rows_traffic(
    model: ModelConfig,
    stage: StageSpec,
    spans: Sequence[Span],
    given: Conditions,
    rows: int,
    length: int,
    *,
    again: bool,
) -> Iterator[TokenTraffic]:
    """Rows on their way to their experts and back, of a rank's part of a piece, none dropped. In a
    run for the graph alone outputs do not come back."""
    moe = model.moe
    layers = list(filter(moe.has_experts, stage.layers))
    repeated, without_outputs = _run_again(model, stage, spans, again=again)
    runs = len(layers) + repeated
    sent = rows * length // (given.cp * given.tp) * moe.top_k * given.etp
    row, weight = model.hidden * DTYPE_BYTES[model.dtype], high_bytes(model)
    back = runs - without_outputs
    forward = runs * (row + weight) + back * row
    yield TokenTraffic("ep", "all_to_all", "F", 2 * runs + back, sent * forward)
    backward = len(layers) * (2 * row + weight)
    yield TokenTraffic("ep", "all_to_all", "I", 3 * len(layers), sent * backward)


def _run_again(
    model: ModelConfig, stage: StageSpec, spans: Sequence[Span], *, again: bool
) -> tuple[int, int]:
    """Layers with experts that are run again, and how many of them for the graph alone."""
    layers, moe = list(stage.layers), model.moe
    graph_only = not model.post_norms and moe.shared_gate == "none"
    if again:
        last = bool(layers) and not stage.head and graph_only and moe.has_experts(layers[-1])
        return sum(map(moe.has_experts, layers)), int(last)
    repeated, without, start = 0, 0, 0
    for span in spans:
        own = layers[start : start + span.blocks]
        start += span.blocks
        if "block" in span.policy.recompute:
            repeated += sum(map(moe.has_experts, own))
            without += graph_only and moe.has_experts(own[-1])
    return repeated, without
