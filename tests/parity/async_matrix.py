"""Dimensions of no-flush training: values for the fields of a case, and which of them go
together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tests.parity import async_reference, matrix
from tests.parity.cases import Case
from tests.parity.matrix import Rule, to_blame
from tests.parity.named_settings import OF_ALL_MODELS
from tests.parity.pairs import Pairs

SHARED = (
    *("sequence_parallel", "in_process", "rule", "compile", "uneven", "dropout", "documents"),
    *("masked", "loss_chunk", "debug", "scatter", "reduce_dtype", "reduce_chunk_mib"),
    *("offload", "vocab", "kv_heads"),
)
"""Dimensions with the values that they have in the parity matrix."""
DIMENSIONS: dict[str, Sequence[Any]] = {
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
    "zero": [1, 0],
    "clip": [(0.05, "stage"), (0.05, "global"), (None, "global")],
    "look_ahead": [0, 1, 2],
    "lr_anneal_steps": [None, 8],
    "synchronous_steps": [None, 2],
    "tied": [False, True],
    "activations": [n for n in matrix.DIMENSIONS["activations"] if n in OF_ALL_MODELS],
    "shard_size": [None, 1],
    "state": [("fp32", "stochastic"), ("bf16", "stochastic"), ("bf16", "nearest")],
    "model": ["gpt2", "llama", "qwen", "neox", "bloom", "gemma"],
    "dtype": ["fp64", "fp32", "bf16"],
    **{name: matrix.DIMENSIONS[name] for name in SHARED},
}
"""Every switch and its values, the plain one first."""
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
RULES: list[Rule] = [
    (("size", "dp", "tp", "in_process"), lambda c: c.world > 8),
    (("compile", "size", "dp", "tp"), lambda c: c.compile and c.world > 2),
    (("sequence_parallel", "tp"), lambda c: c.sequence_parallel and c.tp == 1),
    (("zero", "dp"), lambda c: not c.zero and c.dp == 1),
    (("shard_size", "dp"), lambda c: c.shard_size is not None and c.dp == 1),
    (("reduce_dtype", "dp"), lambda c: c.reduce_dtype is not None and c.dp == 1),
    (("reduce_chunk_mib", "dp"), lambda c: c.reduce_chunk_mib is not None and c.dp == 1),
    (("uneven", "size", "order"), lambda c: c.uneven and _stages(c) == 1),
]
"""Combinations that take a test too long, or in which one of the values has no effect."""


def _ahead(case: Case) -> int:
    """Return the number of micro-batches that the first rank is ahead."""
    if case.replicas is not None:
        first = async_reference.Pipeline("stash", case.pp, case.m, replicas=case.replicas)
        return first.ahead(0) * case.replicas[0]
    if case.schedule == "two_group":
        return 2 * case.m
    lead = {"1f1b": 1, "eager_1f1b": 2}
    return lead[case.schedule] * (case.pp - 1) + (case.advance or 0)


def _stages(case: Case) -> int:
    if case.replicas is not None:
        return len(case.replicas)
    return case.pp * (2 if case.schedule == "two_group" else 1)


def blame(choice: Mapping[str, Any]) -> frozenset[str]:
    """Return dimensions, some of which have to change for a legal choice; none if it is legal."""
    return to_blame(to_case(choice), RULES, JOINT)


MATRIX = Pairs(DIMENSIONS, blame, PLAIN_SHARE, JOINT)


def to_case(choice: Mapping[str, Any]) -> Case:
    """Build the case of one value per dimension. It has 12 windows of fp64; slow cases and narrower
    types have as many as fill the pipeline, and three more."""
    case = Case(batch=1, **MATRIX.fields(dict(choice)))
    return dataclasses.replace(case, layers=max(2, _stages(case) + case.uneven), steps=_steps(case))


def _steps(case: Case) -> int:
    if case.dtype == "fp64" and case.m * case.dp <= 2 and not case.compile:
        return 12
    return (case.synchronous_steps or 0) - (-_ahead(case) // case.m) + 3
