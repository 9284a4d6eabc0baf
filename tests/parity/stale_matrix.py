"""The dimensions of training without a flush, and cases that hold every pair of their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.parity import matrix, stale
from tests.parity.cases import Case
from tests.parity.named_settings import OF_ALL_MODELS
from tests.parity.pairs import Pairs

KEPT = matrix.KEPT
DIMENSIONS: dict[str, list[Any]] = {
    "weights": [
        *(("stash", "update"), ("vertical", "update"), ("double_buffer", "update")),
        *(("double_group", "update"), ("latest", "update")),
        *(("predict", "update"), ("predict", "round_trip"), ("correct", "update")),
    ],
    "size": [
        *((2, 2), (1, 1), (1, 2), (2, 1), (2, 4), (2, 6)),
        *((3, 1), (3, 2), (3, 4), (3, 6), (4, 1), (4, 2), (4, 4), (4, 6)),
    ],
    "order": [
        *(("1f1b", None, None), ("1f1b", 1, None), ("1f1b", 3, None)),
        *(("eager_1f1b", None, None), ("eager_1f1b", 2, None), ("two_group", None, None)),
        *(("1f1b_rr", None, turns) for turns in ((2, 1), (1, 2), (2, 1, 1))),
    ],
    "dp": [1, 2],
    "tp": [1, 2],
    "sequence_parallel": [False, True],
    "in_process": [False, True],
    "zero": [1, 0],
    "rule": matrix.DIMENSIONS["rule"],
    "clip": [(0.05, "stage"), (0.05, "global"), (None, "global")],
    "look_ahead": [0, 1, 2],
    "lr_anneal_steps": [None, 8],
    "synchronous_steps": [None, 2],
    "tied": [False, True],
    "compile": [False, True],
    "uneven": [False, True],
    "dropout": [0.0, 0.2],
    "documents": [False, True],
    "masked": [0.0, 0.4],
    "activations": [n for n in matrix.DIMENSIONS["activations"] if n in OF_ALL_MODELS],
    "loss_chunk": [None, 0, 5],
    "debug": [False, True],
    "scatter": ["off", "on"],
    "shard_size": [None, 1],
    "reduce_dtype": [None, "fp32", "bf16"],
    "reduce_chunk_mib": [None, 1e-6],
    "state": [("fp32", "stochastic"), ("bf16", "stochastic"), ("bf16", "nearest")],
    "offload": ["none", "host", "disk"],
    "model": ["gpt2", "llama", "qwen", "neox", "bloom", "gemma"],
    "vocab": [300, 512],
    "kv_heads": [None, 2],
    "dtype": ["fp64", "fp32", "bf16"],
}
"""Every switch and its values, the plain one first. What streams are given more of joins here."""
JOINT = {
    "weights": ("weights", "horizon"),
    "size": ("pp", "m"),
    "order": ("schedule", "advance", "replicas"),
    "clip": ("clip", "clip_scope"),
    "state": ("state_dtype", "rounding"),
}
"""Dimensions that give several fields of a case their values."""
PLAIN_SHARE = {
    "dp": 0.6,
    "tp": 0.6,
    "dropout": 0.7,
    "reduce_dtype": 0.6,
    "dtype": 0.6,
    "state": 0.5,
    "offload": 0.6,
    "look_ahead": 0.6,
    "lr_anneal_steps": 0.7,
    "synchronous_steps": 0.7,
    "compile": 0.9,
}
ELSEWHERE = {
    **dict.fromkeys(("cp", "context"), "refused"),
    **dict.fromkeys(("chunks", "group", "slices", "lengths", "pairs"), "refused"),
    **dict.fromkeys(("slice_overhead", "slice_attention", "swap"), "refused"),
    **dict.fromkeys(("master", "post_validation", "lora", "loss_scale"), "refused"),
    **dict.fromkeys(("moe", "ep", "etp"), "refused"),
    **dict.fromkeys(
        ("dispatch", "node", "expert_chunks", "pad", "codec", "topology", "placement", "grouped"),
        "of moe, which is refused",
    ),
    "correction": "test_streams",
    "prefetch": "of ZeRO-3, which is refused",
    "overlap": "changes no bit: test_overlap",
    "steps": "follows from the type and the size",
    "layers": "follows from the number of stages",
    "heads": "a size",
    "batch": "a size",
    "sequence": "a size",
}
"""Fields of a case that are no dimension, and why."""
LARGEST = 8
"""Ranks of a world."""
LARGEST_COMPILED = 2
"""Of one whose blocks are traced."""
KEEPS = ("stash", "vertical", "double_buffer", "double_group")
"""Policies whose backward reads what its forward has read."""


def excluded(c: Mapping[str, Any]) -> bool:
    """Whether values exclude each other, or one does nothing beside another."""
    (policy, _), (pp, m), (order, advance, turns) = c["weights"], c["size"], c["order"]
    stages, world = _stages(c), c["dp"] * c["tp"] * (1 if c["in_process"] else pp)
    clip, scope = c["clip"]
    alone = c["dp"] == 1
    return (
        world > LARGEST
        or (policy == "double_group") != (order == "two_group")
        or (order == "two_group" and m < pp - 1)
        or (turns is not None and not _can_take_turns(c))
        or (policy == "double_buffer" and _ahead(c) > m)
        or (clip is not None and scope == "global" and policy != "double_buffer")
        or (c["tied"] and policy != "double_buffer")
        or (c["sequence_parallel"] and c["tp"] == 1)
        or (alone and (not c["zero"] or c["shard_size"] is not None))
        or (alone and (c["reduce_dtype"] is not None or c["reduce_chunk_mib"] is not None))
        or (c["shard_size"] is not None and not c["zero"])
        or (c["uneven"] and stages == 1)
        or (c["scatter"] == "on" and not _are_messages_alike(c))
        or (c["state"][0] == "bf16" and c["dtype"] == "fp64")
        or (c["model"] in ("bloom", "gemma") and bool(c["dropout"]))
        or (c["activations"] == KEPT and (bool(c["dropout"]) or c["model"] == "gemma"))
        or ((policy == "predict" or c["look_ahead"]) and not _has_direction(c))
        or (c["look_ahead"] and (policy not in KEEPS or c["lr_anneal_steps"] is not None))
        or (c["compile"] and (world > LARGEST_COMPILED or not _can_be_compiled(c)))
        or (policy not in KEEPS and (c["activations"] != "keep" or c["compile"]))
        or (policy not in KEEPS and bool(advance) and c["loss_chunk"] != 0)
    )


def _ahead(c: Mapping[str, Any]) -> int:
    """Micro-batches that the first rank is ahead."""
    (pp, m), (order, advance, turns) = c["size"], c["order"]
    if turns is not None:
        first = stale.Pipeline("stash", pp, m, replicas=turns)
        return first.ahead(0) * turns[0]
    lead = {"1f1b": 1, "eager_1f1b": 2}
    return 2 * m if order == "two_group" else lead[order] * (pp - 1) + (advance or 0)


def _stages(c: Mapping[str, Any]) -> int:
    (pp, _), (order, _, turns) = c["size"], c["order"]
    return len(turns) if turns is not None else pp * (2 if order == "two_group" else 1)


def _can_take_turns(c: Mapping[str, Any]) -> bool:
    """Whether stages of several ranks have the ranks, and a window is shared out evenly."""
    (policy, _), (pp, m), (_, _, turns) = c["weights"], c["size"], c["order"]
    even = all(m % of == 0 for of in turns)
    return sum(turns) == pp and even and policy in ("stash", "double_buffer") and not c["tied"]


def _are_messages_alike(c: Mapping[str, Any]) -> bool:
    """Whether tp ranks send the same."""
    several = c["tp"] > 1 and c["size"][0] > 1
    return several and not (c["sequence_parallel"] or c["in_process"])


def _can_be_compiled(c: Mapping[str, Any]) -> bool:
    return not c["dropout"] and c["activations"] in ("keep", "stage", KEPT)


def _has_direction(c: Mapping[str, Any]) -> bool:
    """Whether weights can be predicted."""
    elementwise = c["rule"] not in ("muon", "lars", "lamb")
    return elementwise and c["offload"] == "none" and c["state"][0] == "fp32"


MATRIX = Pairs(DIMENSIONS, excluded, PLAIN_SHARE, JOINT)


def to_case(choice: Mapping[str, Any]) -> Case:
    """The case of one value per dimension: 12 windows of fp64, or, where these take long and in
    narrower types, as many as fill the pipeline and three more."""
    values = MATRIX.fields(choice)
    short = values["dtype"] != "fp64" or values["m"] * values["dp"] > 2 or values["compile"]
    fill = -(-_ahead(choice) // values["m"])
    return Case(
        layers=max(2, _stages(choice) + values["uneven"]),
        batch=1,
        steps=(values["synchronous_steps"] or 0) + fill + 3 if short else 12,
        **values,
    )
