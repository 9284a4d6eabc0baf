"""Exchanges about the tokens of layers with experts. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megapipe.dtypes import DTYPE_BYTES, main_bytes
from megapipe.layers.moe_specs import padded_rows, wire_bytes
from megapipe.layers.policy import Span
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.moe import mixture_parameters, routing_of
from megapipe.model.interface import Among, Collective, Conditions, TokenTraffic
from megapipe.model.partition import StageSpec

_CHOICE, _COUNT = 2, 8
"""Bytes of a choice (int16), and of a count (int64)."""


def routing_traffic(
    model: ModelConfig, stage: StageSpec, given: Conditions, rows: int, length: int
) -> Iterator[TokenTraffic]:
    """About choices, of a piece of `rows` sequences: counts for the balance term, but for one that
    counts those of the last step; with a capacity
    the choices themselves, and the weights if these decide who is dropped; and where experts are
    split, rows for each of them, unless there is room for all. In the first run of a layer alone.
    """
    moe = model.moe
    layers = sum(map(moe.has_experts, stage.layers))
    counts = sum(map(moe.experts_of, stage.layers)) * _COUNT
    if moe.balance_scope != "step":
        scopes = rows if moe.balance_scope == "sequence" else 1
        yield TokenTraffic("sequence", "all_reduce", "routing", layers, scopes * counts)
    if given.dispatch != "fetch" and not given.pad:
        yield TokenTraffic("ep", "all_gather", "routing", layers, given.ep * given.etp * counts)
    if moe.capacity is None:
        return
    choices = layers * rows * length * moe.top_k
    yield TokenTraffic("sequence", "all_gather", "routing", layers, choices * _CHOICE)
    if moe.drop == "score":
        size = choices * max(DTYPE_BYTES[model.dtype], 4)
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
    """Tokens on their way to their experts and back, of a rank's part of a piece, none dropped; or
    rows that have room for all, with those that are empty. In a run for the graph alone outputs do
    not come back. With slots for copies of experts these are counted as a chunk more, which they
    are where a rank has some."""
    moe = model.moe
    own = list(filter(moe.has_experts, stage.layers))
    repeated, without_outputs = _run_again(model, stage, spans, again=again)
    runs = own + repeated
    tokens = rows * length // (given.cp * given.tp)
    chunks = given.expert_chunks + (given.slots > 0)

    def sent(layers: Sequence[int]) -> int:
        if not given.pad:
            return len(layers) * tokens * moe.top_k * given.etp
        sizes = tokens, rows, given.sequence_length
        return given.etp * sum(padded_rows(routing_of(moe, layer), *sizes) for layer in layers)

    row = wire_bytes(given.codec, model.hidden, DTYPE_BYTES[model.dtype])
    weight = max(DTYPE_BYTES[model.dtype], 4)
    if given.dispatch == "all_gather":
        whole = given.ep * given.etp * tokens
        forward = row + moe.top_k * (weight + _CHOICE)
        yield TokenTraffic("ep", "all_gather", "F", 3 * len(runs), len(runs) * whole * forward)
        yield TokenTraffic("ep", "all_gather", "I", len(own), len(own) * whole * row)
        out = ins = 0, 0
    else:
        out = 2 * len(runs), sent(runs) * (row + weight)
        ins = len(own), sent(own) * row
    back = len(runs) - len(without_outputs)
    outputs = sent(runs) - sent(without_outputs)
    hops: tuple[Among, ...] = ("ep",)
    if given.dispatch == "hierarchical":
        hops = "ep in a node", "ep between nodes"
    for what, calls, size in (
        ("F", out[0] + back, out[1] + outputs * row),
        ("I", ins[0] + 2 * len(own), ins[1] + sent(own) * (row + weight)),
    ):
        for hop in hops:
            yield TokenTraffic(hop, "all_to_all", what, calls * chunks, size)


def matrices_traffic(
    model: ModelConfig, stage: StageSpec, spans: Sequence[Span], given: Conditions, *, again: bool
) -> Iterator[TokenTraffic]:
    """Matrices of experts on their way to tokens of a piece, and gradients on their way home."""
    layers = list(filter(model.moe.has_experts, stage.layers))
    repeated, _ = _run_again(model, stage, spans, again=again)

    def exchange(
        collective: Collective, what: str, of: Sequence[int], chunks: int, size: int
    ) -> TokenTraffic:
        each = [spec for layer in of for spec in mixture_parameters(model, layer) if spec.experts]
        numel = sum(spec.local_numel(1, given.ep, given.etp) for spec in each)
        whole = given.ep * given.etp * numel * size
        return TokenTraffic("ep", collective, what, chunks * len(each), whole)

    size, main = DTYPE_BYTES[model.dtype], main_bytes(model.dtype)
    yield exchange("all_gather", "F", layers + repeated, given.expert_chunks, size)
    yield exchange("all_gather", "I", layers, given.expert_chunks, size)
    if given.lora is None:
        yield exchange("reduce_scatter", "W", layers, 1, main)


def _run_again(
    model: ModelConfig, stage: StageSpec, spans: Sequence[Span], *, again: bool
) -> tuple[list[int], list[int]]:
    """Layers with experts that are run again, and those of them for the graph alone."""
    layers, moe = list(stage.layers), model.moe
    graph_only = not model.post_norms and moe.shared_gate == "none"
    if again:
        last = [] if stage.head or not graph_only else layers[-1:]
        return list(filter(moe.has_experts, layers)), list(filter(moe.has_experts, last))
    repeated: list[int] = []
    without: list[int] = []
    start = 0
    for span in spans:
        own = layers[start : start + span.blocks]
        start += span.blocks
        with_experts = list(filter(moe.has_experts, own))
        if "block" in span.policy.recompute:
            repeated += with_experts
            without += filter(moe.has_experts, own[-1:] if graph_only else [])
        elif "experts" in span.policy.recompute:
            repeated += with_experts
            without += with_experts
    return repeated, without
