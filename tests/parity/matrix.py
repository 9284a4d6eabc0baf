"""The dimensions of the parity matrix: values for the fields of a case, and which go together."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megapipe.errors import ConfigError
from tests.parity.cases import SWITCHES, Case, configure
from tests.parity.named_settings import MODELS, MOE
from tests.parity.pairs import Choice, Pairs

SCHEDULES = (
    ("1f1b", 1, None),
    ("gpipe", 1, None),
    ("gpipe", 2, None),
    ("interleaved_1f1b", 1, None),
    ("interleaved_1f1b", 2, None),
    ("zb_h1", 1, None),
    ("zb_v", 2, None),
    ("chimera", 1, None),
    ("chimera_backward_halving", 1, None),
    ("seq1f1b", 1, 2),
)
"""Schedules with their chunks and slices: one for each kind of placement and of work items."""
LAYOUTS = [
    (dp, 1, tp, 3 if (dp, tp, pp) == (1, 1, 4) else pp)
    for dp, tp, pp in itertools.product((1, 2, 4), repeat=3)
    if dp * tp * pp <= 8
]
LAYOUTS.append((1, 1, 1, 5))
LAYOUTS += [
    (dp, cp, tp, pp)
    for dp, cp, tp, pp in itertools.product((1, 2), (2, 4), (1, 2), (1, 2))
    if dp * cp * tp * pp <= 8
]
LAYOUTS += [(4, 2, 1, 1), (1, 2, 4, 1), (1, 2, 1, 4), (1, 8, 1, 1)]
LAYOUTS += [(3, 1, 1, 1), (6, 1, 1, 1)]  # as many ranks as no alignment is a multiple of
JOINT_VALUES: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "schedule": SCHEDULES,
    "state": [
        ("fp32", "fp32", "stochastic"),
        ("bf16", "fp32", "stochastic"),
        ("bf16", "fp32", "nearest"),
        ("fp32", "none", "stochastic"),
        ("fp32", "none", "nearest"),
        ("bf16", "none", "stochastic"),
        ("bf16", "none", "nearest"),
    ],
    "experts": [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (8, 1), (4, 2)],
    "dispatch": [("all_to_all", None), ("all_gather", None), ("hierarchical", 2), ("fetch", None)],
}
"""Values of several fields at once, the plain ones first."""
JOINT = {
    dimension: [name for name, about in SWITCHES.items() if about.dimension == dimension]
    for dimension in JOINT_VALUES
}
"""Fields that each of these dimensions sets."""
DIMENSIONS: dict[str, Sequence[Any]] = JOINT_VALUES | {
    name: about.values for name, about in SWITCHES.items() if about.values
}
"""Every switch and its values, the plain one first."""
PLAIN_SHARE = {
    "dispatch": 0.9,
    "expert_chunks": 0.9,
    "placement": 0.9,
    "pad": 0.9,
    "codec": 0.9,
    "grouped": 0.9,
    "experts": 0.5,
    "moe": 0.9,
    "lora": 0.9,
    "compile": 0.95,
    "dropout": 0.75,
    "reduce_dtype": 0.6,
    "dtype": 0.5,
    "state": 0.5,
    "look_ahead": 0.7,
    "resumed": 0.8,
    "rule": 0.4,
}
"""How often a drawn value is the plain one, if values are not drawn evenly. Other values cost
seconds if blocks are compiled; else they exclude a comparison with the reference's own training."""
LAYERS = {"top 1, capacity 1": 4, "every second": 4}
"""Minimum numbers of layers that include one with experts, if larger than usual."""
OF_FOUR = ("double ring", "teams", "usp", "usp, context first")
"""Contexts that, on rings of two ranks, equal other contexts."""


def _is_narrow(case: Case) -> bool:
    """Whether rows of an expert's width have too few bytes for a grouped product."""
    width = MOE.get(case.moe or "", {}).get("expert_ffn_hidden") or MODELS[case.model].get(
        "ffn_hidden", 64
    )
    return width // case.etp * (4 if case.dtype == "fp32" else 2) % 16 > 0


def _is_cut(case: Case) -> bool:
    """Whether work items are smaller than a micro-batch."""
    return case.slices is not None or case.schedule == "chimera_backward_halving"


Rule = tuple[tuple[str, ...], Callable[[Case], bool]]
"""Dimensions, and whether a case has values of theirs that do not go together."""
WITHOUT_EFFECT: list[Rule] = [
    (("context", "layout"), lambda c: c.cp == 1 and c.context != "ring"),
    (("context", "layout"), lambda c: c.cp % 4 > 0 and c.context in OF_FOUR),
    (("uneven", "layout", "schedule"), lambda c: c.uneven and c.pp * (c.chunks or 1) == 1),
    (("shard_size", "layout"), lambda c: c.shard_size == c.copies > 1),
    (("zero", "layout", "shard_size"), lambda c: c.zero > 1 and 1 in (c.copies, c.shard_size)),
    (("reduce_dtype", "layout"), lambda c: c.reduce_dtype is not None and c.copies == 1),
    (("reduce_chunk_mib", "layout"), lambda c: c.reduce_chunk_mib is not None and c.copies == 1),
    (("post_validation", "layout"), lambda c: c.post_validation and c.pp == 1),
    (("grouped", "moe"), lambda c: c.grouped and c.moe is None),
    (("grouped", "dtype"), lambda c: c.grouped and c.dtype == "fp64"),
    (
        ("grouped", "dtype", "moe", "experts", "model"),
        lambda c: c.grouped and c.moe is not None and _is_narrow(c),
    ),
    (("codec", "experts", "moe"), lambda c: c.codec != "none" and c.ep * c.etp == 1),
    (("codec", "dispatch"), lambda c: c.codec != "none" and c.dispatch == "fetch"),
]
"""Valid combinations in which one of the values has no effect."""
BEYOND_THE_REFERENCE: list[Rule] = [
    # in a narrow type, other rounding errors decide to which step a value is rounded
    (("codec", "dtype"), lambda c: c.codec != "none" and c.dtype != "fp64"),
    # equal tokens that begin a sequence or a document have equal weights
    (
        ("moe", "model"),
        lambda c: (
            MOE.get(c.moe or "", {}).get("drop_policy") == "score"
            and "positions" in MODELS[c.model]
        ),
    ),
    # the reference draws the noise of whole micro-batches
    (("dropout", "schedule"), lambda c: bool(c.dropout) and _is_cut(c)),
    # each rank traces for itself, and there are few cores
    (("compile", "layout", "in_process"), lambda c: c.compile and c.world > 4),
]
"""Combinations that the package computes, but that no test can judge, or only slowly."""


def dimensions_named(text: str, joint: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return the dimensions whose keys, or keys of whose section, a message names."""
    of_field = {field: dimension for dimension, fields in joint.items() for field in fields}
    keys = {about.key: of_field.get(name, name) for name, about in SWITCHES.items() if about.key}
    found = set()
    for named in re.findall(r"\b[a-z]+(?:\.\w+)+", text):
        while named and named not in keys:
            named = named.rpartition(".")[0]
        found.add(keys.get(named, ""))
    return frozenset(found - {""})


def to_blame(
    case: Case, rules: Sequence[Rule], joint: Mapping[str, Sequence[str]]
) -> frozenset[str]:
    """Return dimensions, some of which have to change to make a case legal: those of a rule, or
    those that the package names when it refuses the configuration."""
    for dimensions, excludes in rules:
        if excludes(case):
            return frozenset(dimensions)
    try:
        configure(case)
    except ConfigError as error:
        return dimensions_named(str(error), joint) | {"layout"}
    return frozenset()


def blame(choice: Mapping[str, Any]) -> frozenset[str]:
    """Return dimensions, some of which have to change for a legal choice; none if it is legal."""
    return to_blame(to_case(choice), [*WITHOUT_EFFECT, *BEYOND_THE_REFERENCE], JOINT)


MATRIX = Pairs(DIMENSIONS, blame, PLAIN_SHARE, JOINT)


def to_case(choice: Mapping[str, Any]) -> Case:
    """Build the case of one value per dimension."""
    values = MATRIX.fields(dict(choice))
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
    """Yield the full product of layouts, schedules and micro-batches, with other values drawn."""
    for layout, schedule, m in itertools.product(LAYOUTS, SCHEDULES, sorted(DIMENSIONS["m"])):
        given = {"layout": layout, "schedule": schedule, "m": m}
        while (choice := MATRIX.draw(rng, given)) is None:
            pass
        yield choice
