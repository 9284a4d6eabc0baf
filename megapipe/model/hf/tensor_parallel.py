"""Tensor parallelism by the plan that a transformers class brings with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from megapipe.layers.user_linear import ColumnLinear, Linear, RowLinear
from megapipe.model.hf.units import Unit

LINEARS: Mapping[str, type[Linear]] = {"colwise": ColumnLinear, "rowwise": RowLinear}
"""Linear layers by the style that a plan gives them. With every other style each rank has the whole
layer, as with ``colwise_gather_output`` and ``rowwise_split_input``, which save memory alone."""
SUMMED = "replicated_with_grad_allreduce"
"""Style of a module between split layers: each rank has all of it, and gradients are summed."""


def split_units(units: Iterable[Unit], plan: Mapping[str, str]) -> None:
    """Defer the weight gradients of linear layers to W, and split the layers that a plan splits.

    `plan`: styles by patterns of module names, ``*`` for a number, as transformers writes them.
    """
    styles = {_pattern(name): style for name, style in plan.items()}
    for unit in units:
        for path, module in unit.named_modules():
            name = unit.name_in_class(path)
            style = next((styles[each] for each in styles if each.fullmatch(name)), "")
            if type(module) is nn.Linear:
                module.__class__ = LINEARS.get(style, Linear)
                module.bound = None  # type: ignore[assignment]
            elif style == SUMMED:
                module.heads_partial = True


def plan_of(model: Any) -> dict[str, str]:
    """Return the plan of a class, with the names of its modules."""
    plan: dict[str, str] = model.tp_plan or {}
    return plan


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+"))
