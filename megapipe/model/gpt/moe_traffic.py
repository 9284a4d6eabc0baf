"""Exchanges about the tokens of layers with experts. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megapipe.dtypes import DTYPE_BYTES, main_bytes
from megapipe.layers.moe_specs import wire_bytes
from megapipe.layers.policy import Span
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.moe import mixture_parameters
from megapipe.model.gpt.moe_memory import CHOICE, COUNT, high_bytes
from megapipe.model.interface import Among, Collective, Conditions, TokenTraffic
from megapipe.model.partition import StageSpec


def routing_traffic(
    model: ModelConfig, stage: StageSpec, given: Conditions, rows: int, length: int
) -> Iterator[TokenTraffic]:
    """About choices, of a piece of `rows` sequences: counts for the balance term, but for one that
    counts those of the last step; with a capacity
    the choices themselves, and the weights if these decide who is dropped; and where experts are
    split, rows for each of them. In the first run of a layer alone."""
    moe = model.moe
    layers = sum(map(moe.has_experts, stage.layers))
    counts = sum(map(moe.experts_of, stage.layers)) * COUNT
    if moe.balance_scope != "step":
        scopes = rows if moe.balance_scope == "sequence" else 1
        yield TokenTraffic("sequence", "all_reduce", "routing", layers, scopes * counts)
    if given.dispatch != "fetch":
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
    """Tokens on their way to their experts and back, of a rank's part of a piece, none dropped. In
    a run for the graph alone outputs do not come back. With slots for copies of experts these are
    counted as a chunk more, which they are where a rank has some."""
    moe = model.moe
    layers = sum(map(moe.has_experts, stage.layers))
    repeated, without_outputs = _run_again(model, stage, spans, again=again)
    runs = layers + len(repeated)
    tokens = rows * length // (given.cp * given.tp)
    chunks = given.expert_chunks + (given.slots > 0)
    row = wire_bytes(given.codec, model.hidden, DTYPE_BYTES[model.dtype])
    weight = high_bytes(model)
    if given.dispatch == "all_gather":
        whole = given.ep * given.etp * tokens
        forward = row + moe.top_k * (weight + CHOICE)
        yield TokenTraffic("ep", "all_gather", "F", 3 * runs, runs * whole * forward)
        yield TokenTraffic("ep", "all_gather", "I", layers, layers * whole * row)
        out = ins = 0, 0
    else:
        out, ins = (2 * runs, runs * (row + weight)), (layers, layers * row)
    back = runs - without_outputs
    sent = tokens * moe.top_k * given.etp
    hops: tuple[Among, ...] = ("ep",)
    if given.dispatch == "hierarchical":
        hops = "ep in a node", "ep between nodes"
    for what, calls, each in (
        ("F", out[0] + back, out[1] + back * row),
        ("I", ins[0] + 2 * layers, ins[1] + layers * (row + weight)),
    ):
        for hop in hops:
            yield TokenTraffic(hop, "all_to_all", what, calls * chunks, sent * each)


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
) -> tuple[list[int], int]:
    """Layers with experts that are run again, and how many of them for the graph alone."""
    layers, moe = list(stage.layers), model.moe
    graph_only = not model.post_norms and moe.shared_gate == "none"
    if again:
        last = bool(layers) and not stage.head and graph_only and moe.has_experts(layers[-1])
        return list(filter(moe.has_experts, layers)), int(last)
    repeated: list[int] = []
    without = start = 0
    for span in spans:
        own = layers[start : start + span.blocks]
        start += span.blocks
        with_experts = list(filter(moe.has_experts, own))
        if "block" in span.policy.recompute:
            repeated += with_experts
            without += graph_only and moe.has_experts(own[-1])
        elif "experts" in span.policy.recompute:
            repeated += with_experts
            without += len(with_experts)
    return repeated, without
