"""The dimensions of the parity matrix, and cases that between them hold every pair of values."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

from tests.parity.cases import Case
from tests.parity.named_settings import CONTEXTS, MODELS, MOE, OF_ALL_MODELS
from tests.parity.pairs import Choice, Pairs

SCHEDULES = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("gpipe", 2),
    ("interleaved_1f1b", 1),
    ("interleaved_1f1b", 2),
    ("zb_h1", 1),
)
LAYOUTS = [
    (dp, 1, tp, 3 if (dp, tp, pp) == (1, 1, 4) else pp)
    for dp, tp, pp in itertools.product((1, 2, 4), repeat=3)
    if dp * tp * pp <= 8
]
LAYOUTS.append((1, 1, 1, 5))
SPLIT = [
    (dp, cp, tp, pp)
    for dp, cp, tp, pp in itertools.product((1, 2), (2, 4), (1, 2), (1, 2))
    if dp * cp * tp * pp <= 8
]
SPLIT += [(4, 2, 1, 1), (1, 2, 4, 1), (1, 2, 1, 4), (1, 8, 1, 1)]
"""Layouts whose ranks share the positions of a sequence."""
LAYOUTS += SPLIT
STATES = [
    ("fp32", "fp32", "stochastic"),
    ("bf16", "fp32", "stochastic"),
    ("bf16", "fp32", "nearest"),
    ("fp32", "none", "stochastic"),
    ("fp32", "none", "nearest"),
    ("bf16", "none", "stochastic"),
    ("bf16", "none", "nearest"),
]
"""State dtype, master, rounding."""
KEPT = "full, attention kept"
WHOLE = "whole"
"""The context of sequences that are not split."""
DIMENSIONS: dict[str, list[Any]] = {
    "layout": LAYOUTS,
    "context": [WHOLE, *(name for name in CONTEXTS if name != "own")],
    "schedule": list(SCHEDULES),
    "m": [2, 1, 3, 4, 5, 6, 7, 8, 9],
    "sequence_parallel": [False, True],
    "tied": [True, False],
    "uneven": [False, True],
    "vocab": [300, 512],
    "kv_heads": [None, 2],
    "masked": [0.0, 0.4],
    "documents": [False, True],
    "zero": [1, 0, 2, 3],
    "shard_size": [None, 1, 2],
    "prefetch": [1, 0],
    "reduce_dtype": [None, "fp32", "bf16"],
    "reduce_chunk_mib": [None, 1e-6],
    "offload": ["none", "host", "disk"],
    "post_validation": [False, True],
    "rule": [
        *("adamw", "adam", "sgd", "lion", "muon", "lars", "lamb"),
        *("rmsprop", "nadamw", "adabelief", "adam3"),
    ],
    "look_ahead": [0, 2],
    "state": STATES,
    "dtype": ["fp64", "fp32", "bf16", "fp16"],
    "dropout": [0.0, 0.2],
    "compile": [False, True],
    "loss_chunk": [None, 0, 5],
    "lora": [None, "all", "some", "heads together"],
    "moe": [
        *(None, "top 2", "top 1, capacity 1", "capacity, choice", "capacity, position"),
        *("capacity, score", "groups", "shared, gated", "step", "random", "sixteen"),
        *("pyramid", "pyramid, biased"),  # the former has a residual
    ],
    "experts": [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (8, 1), (4, 2)],
    "dispatch": [("all_to_all", None), ("all_gather", None), ("hierarchical", 2), ("fetch", None)],
    "expert_chunks": [1, 3],
    "placement": ["static", "changing", "migrating"],
    "pad": [False, True],
    "codec": ["none", "bf16", "int8"],
    "model": ["gpt2", "llama", "mixed", "qwen", "neox", "bloom", "capped", "gemma"],
    "activations": [
        *("keep", "stage", "full, two together", "of each some", "experts again"),
        KEPT,
    ],
    "in_process": [False, True],
    "scatter": ["off", "on"],
    "debug": [False, True],
    "clip": [0.05, None],
}
"""Every switch and its values, the plain one first."""
JOINT = {
    "layout": ("dp", "cp", "tp", "pp"),
    "schedule": ("schedule", "chunks"),
    "state": ("state_dtype", "master", "rounding"),
    "experts": ("ep", "etp"),
    "dispatch": ("dispatch", "node"),
}
"""Dimensions that give several fields of a case their values."""
ELSEWHERE = {
    "group": "follows from the schedule and m; all values: test_schedules",
    "slices": "test_schedules",
    "lengths": "test_slices",
    "slice_overhead": "test_slices",
    "slice_attention": "test_slices",
    "pairs": "test_schedules",
    "replicas": "test_schedules",
    "advance": "test_schedules",
    "weights": "test_streams",
    "horizon": "test_streams",
    "correction": "test_streams",
    "lr_anneal_steps": "test_streams",
    "synchronous_steps": "test_streams",
    "clip_scope": "test_streams",
    "overlap": "changes no bit: test_overlap",
    "swap": "test_schedules",
    "grouped": "a kernel: test_moe",
    "topology": "goes by the rank of a sequence: test_topology",
    "loss_scale": "one at which fp16 does not overflow; dynamic ones: test_fp16",
    "steps": "many: test_parity",
    "layers": "follows from the number of stages",
    "heads": "a size; what three tp ranks can share: test_odd_sizes",
    "batch": "follows from m",
    "sequence": "a size",
}
"""Fields of a case that are no dimension, and why, or where they vary."""
PLAIN_SHARE = {
    "dispatch": 0.9,
    "expert_chunks": 0.9,
    "placement": 0.9,
    "pad": 0.9,
    "codec": 0.9,
    "experts": 0.5,
    "moe": 0.9,
    "lora": 0.9,
    "compile": 0.95,
    "dropout": 0.75,
    "reduce_dtype": 0.6,
    "dtype": 0.5,
    "state": 0.5,
    "look_ahead": 0.7,
    "rule": 0.4,
}
"""How often a drawn value is the plain one, where values are no equals. Any other costs: seconds if
blocks are compiled, and else that the reference's own training is no longer what is expected."""
LAYERS = {"top 1, capacity 1": 4}
"""The fewest of which one has experts, where these are more than usual."""
HEADS = Case.heads
LARGEST_COMPILED = 4
"""Ranks: each traces for itself, and there are few cores."""


def excluded(c: Mapping[str, Any]) -> bool:
    """Whether values exclude each other, or one does nothing beside another."""
    dp, cp, tp, pp = c["layout"]
    copies = dp * cp
    stages = pp * c["schedule"][1]
    world = copies * tp * (1 if c["in_process"] else pp)
    state_dtype, master, _ = c["state"]
    sharded = c["shard_size"] is not None
    return (
        (c["kv_heads"] == 2 and tp > 2)
        or (c["uneven"] and stages == 1)
        or (sharded and (copies % c["shard_size"] > 0 or not c["zero"]))
        or (c["shard_size"] == copies > 1)
        or (c["zero"] >= 2 and 1 in (copies, c["shard_size"]))
        or (c["prefetch"] == 0 and c["zero"] < 3)
        or (c["reduce_dtype"] is not None and copies == 1)
        or (c["reduce_chunk_mib"] is not None and copies == 1)
        or (master == "none" and c["dtype"] != "bf16")
        or (state_dtype == "bf16" and c["dtype"] == "fp64")
        or (c["model"] in ("bloom", "capped", "gemma") and c["dropout"])
        or (c["post_validation"] and not _can_be_undone(c))
        or (c["look_ahead"] and not _has_direction(c))
        or (c["scatter"] == "on" and not _are_messages_alike(c))
        or (c["compile"] and (world > LARGEST_COMPILED or not _can_be_compiled(c)))
        or not _are_there_ranks_for(c)
        or (c["moe"] is not None and not _can_have_experts(c))
        or (c["moe"] is None and c["activations"] not in OF_ALL_MODELS)
        or not _can_be_dispatched(c)
        or not _can_be_split(c)
    )


def _can_be_split(c: Mapping[str, Any]) -> bool:
    """Whether a context has ranks, and goes with the rest."""
    _, cp, tp, _ = c["layout"]
    context, heads = c["context"], (c["kv_heads"] or HEADS) // tp
    by_blocks = cp > 1 or c["activations"] == KEPT
    if by_blocks and (c["dropout"] or c["model"] == "gemma"):  # which has windows
        return False
    if cp == 1 or context == WHOLE:
        return cp == 1 and context == WHOLE
    if c["documents"] and context == "striped":
        return False
    ulysses = cp if context == "ulysses" else 2 if "usp" in context else 1
    fits = HEADS // tp % ulysses == 0 and max(heads, ulysses) % min(heads, ulysses) == 0
    of_four = ("double ring", "teams", "usp", "usp, context first")
    return fits and (cp % 4 == 0 or context not in of_four)


def _are_there_ranks_for(c: Mapping[str, Any]) -> bool:
    """Whether experts, if any, and their ranks divide each other."""
    (dp, cp, tp, _), (ep, etp) = c["layout"], c["experts"]
    if c["moe"] is None:
        return ep * etp == 1
    width = MOE[c["moe"]].get("ffn", etp)
    divisible = all(number % ep == 0 for number in _numbers(c["moe"])) and width % etp == 0
    return divisible and dp * cp * tp % (ep * etp) == 0


def _numbers(moe: str) -> list[int]:
    """Of experts, in the layers that have some."""
    experts = MOE[moe]["experts"]
    return experts if isinstance(experts, list) else [experts]


def _can_have_experts(c: Mapping[str, Any]) -> bool:
    """Whether layers may have experts, and the reference makes the same choices."""
    dp, cp, tp, _ = c["layout"]
    copies = dp * cp * tp // math.prod(c["experts"])
    if copies % min(c["shard_size"] or copies, copies):
        return False
    by_weight = MOE[c["moe"]].get("drop") == "score"
    if by_weight and "positions" in MODELS[c["model"]]:
        return False  # equal tokens that begin a sequence or a document have equal weights
    split = tp > 1 and not c["sequence_parallel"]
    frozen = c["lora"] is not None and not _can_be_adapted(c)
    return not (split or frozen or c["scatter"] == "on")


def _can_be_adapted(c: Mapping[str, Any]) -> bool:
    """Whether routers keep nothing that moves, and there is an MLP for adapters of one."""
    moe = MOE[c["moe"]]
    return "bias_rate" not in moe and (c["lora"] != "some" or "shared" in moe)


def _can_be_dispatched(c: Mapping[str, Any]) -> bool:
    """Whether tokens go to experts of other ranks, which are enough for the form."""
    moe, (ep, etp), (dispatch, node) = c["moe"], c["experts"], c["dispatch"]
    chunks = c["expert_chunks"]
    if c["placement"] != "static" and not _can_be_placed(c):
        return False
    if c["pad"] and "capacity" not in MOE.get(moe, {}):
        return False
    if c["codec"] != "none" and (dispatch == "fetch" or c["dtype"] != "fp64"):
        return False  # in a narrow type what is rounded to which step is decided by other roundings
    if ep * etp == 1:
        return dispatch == "all_to_all" and chunks == 1 and c["codec"] == "none"
    fewest = min(_numbers(moe)) // ep
    return chunks <= fewest and (node is None or node < ep * etp)


def _can_be_placed(c: Mapping[str, Any]) -> bool:
    """Whether other ranks have experts, whose weights and gradients are whole in time for copies;
    those that migrate have none."""
    whole = c["zero"] < 3 or c["placement"] == "migrating"
    whole = whole and not c["post_validation"] and c["lora"] is None
    return whole and c["experts"][0] > 1 and c["dispatch"][0] != "fetch" and not c["pad"]


def _can_be_undone(c: Mapping[str, Any]) -> bool:
    elementwise = c["rule"] not in ("muon", "lars", "lamb")
    here = c["offload"] == "none" and not c["in_process"]
    several = c["layout"][-1] > 1
    return elementwise and here and several and c["zero"] < 3


def _has_direction(c: Mapping[str, Any]) -> bool:
    """Whether weights can be predicted."""
    elementwise = c["rule"] not in ("muon", "lars", "lamb")
    here = c["offload"] == "none" and c["state"][:2] == ("fp32", "fp32")
    return elementwise and here and c["dtype"] != "fp16" and not c["post_validation"]


def _are_messages_alike(c: Mapping[str, Any]) -> bool:
    """Whether tp ranks send the same."""
    *_, tp, pp = c["layout"]
    return tp > 1 and pp > 1 and not (c["sequence_parallel"] or c["in_process"])


def _can_be_compiled(c: Mapping[str, Any]) -> bool:
    return not (c["dropout"] or c["lora"]) and c["activations"] in ("keep", "stage", KEPT)


def fit(rng: random.Random, choice: Choice, given: Mapping[str, Any]) -> Choice:
    """A drawn choice whose context has ranks, if any; and likewise what goes to experts of other
    ranks."""
    if "layout" not in given and "context" in given:
        choice["layout"] = rng.choice(LAYOUTS if choice["context"] == WHOLE else SPLIT)
    if "context" not in given and choice["layout"][1] == 1:
        choice["context"] = WHOLE
    elif "context" not in given and choice["context"] == WHOLE:
        choice["context"] = rng.choice(DIMENSIONS["context"][1:])
    if "codec" in given and choice["codec"] != "none" and "dtype" not in given:
        choice["dtype"] = "fp64"
    if choice["moe"] is None and "experts" not in given:
        choice["experts"] = 1, 1
    about_rows = {"dispatch", "expert_chunks", "pad", "codec", "placement"}
    if not _goes_to_experts(choice):
        choice |= {name: DIMENSIONS[name][0] for name in sorted(about_rows - given.keys())}
    if not _goes_to_experts(choice):
        if about_rows.isdisjoint(given) and given.get("experts", (1, 1)) == (1, 1):
            return choice | {"experts": (1, 1)}
        dp, cp, tp, _ = choice["layout"]
        fitting = [
            both
            for both in _with_ranks(dp * cp * tp)
            if all(both[name] == given.get(name, both[name]) for name in both)
            and _can_be_dispatched(choice | both)
        ]
        choice |= rng.choice(fitting) if fitting else {}
    return choice


def _goes_to_experts(choice: Mapping[str, Any]) -> bool:
    return _are_there_ranks_for(choice) and _can_be_dispatched(choice)


@functools.cache
def _with_ranks(ranks: int) -> list[Mapping[str, Any]]:
    """Settings of experts that so many neighbours can hold."""
    every = itertools.product(DIMENSIONS["moe"], DIMENSIONS["experts"])
    found = ({"moe": moe, "experts": experts} for moe, experts in every)
    return [both for both in found if _are_there_ranks_for(both | {"layout": (ranks, 1, 1, 1)})]


MATRIX = Pairs(DIMENSIONS, excluded, PLAIN_SHARE, JOINT, fit)


def to_case(choice: Mapping[str, Any]) -> Case:
    """The case of one value per dimension."""
    values = MATRIX.fields(choice)
    m, stages = values["m"], values["pp"] * values["chunks"]
    deep = values["schedule"] == "interleaved_1f1b" and m % 2
    return Case(
        group=1 + m // 2 if deep else None,
        layers=max(LAYERS.get(values["moe"], 3), stages + values["uneven"]),
        batch=1 if m > 4 else 2,
        sequence=8 * max(1, values["cp"] // 2, values["cp"] * values["tp"] // 4),
        loss_scale=2.0**10 if choice["dtype"] == "fp16" else None,
        **values,
    )


def layouts_in_full(rng: random.Random) -> Iterator[Choice]:
    """The full product of layouts, schedules and micro-batches, other values drawn for each."""
    for layout, schedule, m in itertools.product(LAYOUTS, SCHEDULES, sorted(DIMENSIONS["m"])):
        given = {"layout": layout, "schedule": schedule, "m": m}
        while excluded(choice := MATRIX.draw(rng, given)):
            pass
        yield choice
