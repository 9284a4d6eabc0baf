"""Tensor-parallel collectives of a GPT's stages (Shoeybi et al., 1909.08053; 2205.05198)."""

import itertools
from collections.abc import Collection, Iterable, Sequence

from megapipe.layers.policy import Span
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.lora import COLUMNS, places, targets_in
from megapipe.model.interface import Collective, Conditions
from megapipe.model.partition import StageSpec

LOSS_NUMBERS = 3
"""Numbers per token that the cross-entropy gathers over tp: maximum, sum, label's logit."""


def _pairs(model: ModelConfig, layer: int) -> int:
    """A layer's pairs of a column- and a row-parallel linear: attention and, unless there are
    experts alone, an MLP."""
    return 1 if model.moe.has_experts(layer) and model.moe.shared is None else 2


def _leaves_out(model: ModelConfig, layer: int) -> bool:
    """Whether a run for the graph alone leaves out the layer's last reduction, that of its MLP."""
    moe = model.moe
    needed = moe.has_experts(layer) and (moe.shared is None or moe.shared_gate != "none")
    return not (model.post_norms or needed)


def stage_collectives(
    model: ModelConfig,
    stage: StageSpec,
    spans: Sequence[Span],
    given: Conditions,
    *,
    again: bool,
    fused: bool,
) -> dict[tuple[Collective, str], int]:
    """Collectives of hidden states in one pass through a stage, by kind and operation.

    A recomputation leaves out the product of its last linear layer, and so the last reduction,
    unless something comes after it (:func:`_leaves_out`). A
    `fused` backward gathers the gradients of row layers once; compiled blocks gather them twice
    even so. Frozen layers gather nothing in W.
    """
    layers = list(stage.layers)
    linears = sum(_pairs(model, layer) for layer in layers)
    if again:
        repeated, left_out = layers, 0
        if layers and not stage.head:
            left_out = int(_leaves_out(model, layers[-1]))
    else:
        repeated, left_out, start = [], 0, 0
        for span in spans:
            own = layers[start : start + span.blocks]
            start += span.blocks
            if "block" in span.policy.recompute:
                repeated += own
                left_out += _leaves_out(model, own[-1])
    rerun = sum(_pairs(model, layer) for layer in repeated)
    columns = linears + rerun
    rows = linears + rerun - left_out + stage.embedding * (1 + again)
    head_forwards = stage.head * (1 + again)
    kept_logits = stage.head * (given.loss_chunk == 0)
    gathered = linears * (1 if fused and not given.compile else 2)
    if not given.sequence_parallel:
        return {("all_reduce", "F"): rows, ("all_reduce", "I"): linears + stage.head}
    return {
        ("all_gather", "F"): columns + head_forwards,
        ("reduce_scatter", "F"): rows,
        ("all_gather", "I"): linears,
        ("reduce_scatter", "I"): linears + stage.head,
        ("all_gather", "W"): 0 if given.lora else gathered + stage.embedding + kept_logits,
    }


def adapter_collectives(
    model: ModelConfig,
    stage: StageSpec,
    spans: Sequence[Span],
    given: Conditions,
    *,
    again: bool,
    fused: bool,
) -> dict[tuple[Collective, str], int]:
    """The same of what adapters exchange, which has their rank's values per token.

    Beside a row-parallel layer whose product a recomputation leaves out, the adapter's first
    product, which is summed up, is computed again all the same.
    """
    if given.lora is None:
        return {}
    lora = given.lora

    def adapted(layer: int) -> list[str]:
        return [places(model)[target].layer for target in targets_in(model, lora, layer)]

    def columns_in(layers: Iterable[int]) -> int:
        return sum(name in COLUMNS for layer in layers for name in adapted(layer))

    def rows_in(layers: Iterable[int], rerun: Collection[str] = ("block",)) -> int:
        """Of the modules that are run again, or of whole blocks."""
        found = 0
        for layer in layers:
            names, whole = adapted(layer), "block" in rerun
            activates = "mlp_activation" in rerun and not model.moe.has_experts(layer)
            found += names.count("attention.out") * (whole or "attention" in rerun)
            found += names.count("mlp.down") * (whole or activates)
        return found

    columns, rows = columns_in(stage.layers), rows_in(stage.layers)
    column_runs, row_runs = columns * (1 + again), rows * (1 + again)
    layers = iter(stage.layers)
    for span in () if again else spans:
        own = list(itertools.islice(layers, span.blocks))
        row_runs += rows_in(own, span.policy.recompute)
        column_runs += columns_in(own) * ("block" in span.policy.recompute)
    if not given.sequence_parallel:
        return {("all_reduce", "F"): row_runs, ("all_reduce", "I"): columns}
    return {
        ("all_gather", "F"): column_runs,
        ("reduce_scatter", "F"): row_runs,
        ("all_gather", "I"): rows,
        ("reduce_scatter", "I"): columns,
        ("all_gather", "W"): columns + (0 if fused else rows),
    }
