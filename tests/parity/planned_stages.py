"""Stages of many kinds, which are planned by runs without values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megapipe.config.config import Config
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from tests.parity import user_models
from tests.parity.cases import Case, configure

ONE = Case(pp=4, in_process=True, layers=8, dtype="fp32")
LLAMA = replace(ONE, model="llama", kv_heads=2)
TP = replace(ONE, tp=2)
SP = replace(LLAMA, tp=2, sequence_parallel=True)
CP = replace(ONE, cp=2, sequence=64)
EP = replace(SP, ep=2, moe="top 2")
SLICED = replace(LLAMA, schedule="seq1f1b", slices=4, sequence=32)
OWN = Case(pp=2, in_process=True, layers=6)
"""A case for user-defined models."""


ENDS = {"pipeline": {"stage_layout": "E | L*4 | L*4 | H"}}
"""Settings with stages that have no layers."""
MIXTURE = {"data": {"mixture": {name: {"source": name, "weight": 1} for name in "abc"}}}


class Stages(NamedTuple):
    """A case, and its stages to be measured."""

    case: Case
    stages: Sequence[int] = (1,)
    rows: int | None = None
    """Samples of a part of a micro-batch, as some schedules have it; None: all of them."""
    own: str = ""
    """User-defined model in tests.parity.user_models."""
    loss: str | None = None
    """User-defined loss in tests.parity.user_models."""
    keys: Mapping[str, Mapping[str, Any]] = {}
    """Configuration keys that cases do not have, by section."""

    @property
    def name(self) -> str:
        more = [str(each) for each in (self.own, self.loss, self.rows, self.keys) if each]
        return " ".join([self.case.name, *more])

    def configure(self) -> tuple[Config, Layout]:
        if self.own:
            own = user_models.Own(self.own, self.case, self.case.layers, self.loss)
            return user_models.settle(own)
        config, layout = configure(self.case)
        if not self.keys:
            return config, layout
        tree = config.model_dump()
        for section, keys in self.keys.items():
            tree[section].update(keys)
        return resolve(Config.model_validate(tree), self.case.world, self.case.vocab)


CASES = [
    Stages(ONE, (0, 1, 3)),
    Stages(LLAMA, (1, 3)),
    Stages(replace(ONE, dtype="bf16"), (1, 3)),
    Stages(replace(LLAMA, dtype="bf16"), (1, 3)),
    Stages(replace(ONE, dtype="fp64")),
    Stages(replace(ONE, dropout=0.2), (0, 1)),
    Stages(replace(ONE, loss_chunk=5), (3,)),
    Stages(replace(LLAMA, tied=False, vocab=512), (3,)),
    *(Stages(replace(ONE, model=model)) for model in ("mixed", "qwen", "neox", "bloom", "gemma")),
    Stages(replace(ONE, model="capped"), (1, 3)),
    Stages(replace(LLAMA, documents=True)),
    *(
        Stages(replace(LLAMA, activations=name))
        for name in (
            *("stage", "full", "full, two together", "full, attention kept", "selective"),
            *("selective, attention kept", "stage, attention kept", "selective, one block"),
            *("offload", "of each some"),
        )
    ),
    Stages(replace(ONE, lora="all"), (0, 1, 3)),
    Stages(replace(ONE, lora="some")),
    Stages(replace(LLAMA, lora="all", activations="stage"), (0,), keys=ENDS),
    Stages(replace(TP, lora="heads together")),
    Stages(replace(ONE, pp=1, layers=2), (0,)),
    Stages(ONE, (3,), keys=MIXTURE),
    Stages(replace(ONE, documents=True), (0,), keys={"data": {"reset_position_ids": True}} | ENDS),
    Stages(OWN, (0, 1), own="split"),
    Stages(OWN, own="split", loss="squares"),
    *(Stages(OWN, (0, 1), own=name) for name in ("tied", "severed")),
    Stages(OWN, (0,), own="attending"),
    Stages(replace(OWN, activations="stage"), (0, 1), own="tuples"),
    Stages(replace(OWN, tp=2), (0,), own="parallel"),
    Stages(TP, (3,)),
    Stages(SP, (0, 1, 3)),
    Stages(replace(SP, model="own norm"), (1, 3)),
    Stages(replace(SP, dtype="bf16", loss_chunk=5), (1, 3)),
    Stages(replace(SP, dropout=0.2)),
    Stages(replace(TP, tp=4, sequence_parallel=True, model="mixed", kv_heads=4)),
    Stages(CP, (0, 3)),
    *(
        Stages(replace(CP, context=plan))
        for plan in ("striped", "all_gather", "queries travel", "helpers", "contiguous")
    ),
    Stages(replace(CP, model="capped", context="ulysses")),
    Stages(replace(CP, dtype="bf16", activations="full, attention kept")),
    Stages(replace(CP, cp=4, sequence=128, context="teams")),
    Stages(replace(CP, documents=True)),
    Stages(replace(CP, model="llama", kv_heads=2, context="ulysses", documents=True)),
    Stages(replace(CP, cp=4, sequence=128, context="usp", documents=True)),
    Stages(replace(CP, cp=4, sequence=128, context="double ring")),
    Stages(replace(CP, moe="top 2", ep=2)),
    Stages(EP, (3,)),
    Stages(EP, rows=1),
    *(Stages(replace(EP, moe=name)) for name in ("groups", "residual")),
    Stages(replace(EP, activations="experts again", expert_chunks=2)),
    Stages(replace(EP, dispatch="all_gather")),
    Stages(replace(EP, dispatch="fetch")),
    Stages(replace(EP, ep=1, etp=2)),
    Stages(replace(EP, codec="int8")),
    Stages(replace(EP, moe="capacity, choice", pad=True)),
    *(
        Stages(replace(EP, moe=name, sequence=48))  # choices are dropped
        for name in ("capacity, choice", "step", "pyramid, biased")
    ),
    Stages(replace(EP, placement="changing", expert_chunks=2)),
    Stages(replace(EP, ep=4, dp=2, dispatch="hierarchical", node=2)),
    Stages(replace(EP, grouped=True)),
    Stages(SLICED, (0, 1, 3)),
    Stages(replace(SLICED, moe="top 2", lengths=(8, 8, 8, 8))),
    Stages(replace(SLICED, cp=2, sequence=64)),
]
