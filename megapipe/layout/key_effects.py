"""Keys whose effect depends on what others come to: a family, a schedule, spans.

Its field says what a key needs of other keys (:class:`~megapipe.config.section.Needs`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megapipe.config.activations import ActivationsConfig
from megapipe.config.config import Config
from megapipe.config.unused_keys import refuse_unused
from megapipe.config.update_rules import RULES, declaration
from megapipe.layers.policy import BlockSpan
from megapipe.model.kernel_needs import KernelNeeds
from megapipe.words import join_or


def check_kernels(config: Config, kernels: KernelNeeds, name: str) -> None:
    """Refuse kernels asked for by name where the family `name` has nothing for them to do.

    Torch's own are taken, as a configuration may name them for all purposes, but for attention and
    norms of a family that calls none.
    """
    wanted, rule = config.kernels, config.optimizer.rule
    lacking = [key for key in ("attention", "norm") if getattr(kernels, key) is None]
    refuse_unused("kernels", wanted, lacking, f"with {name}, which calls none of megapipe's", "")
    plain = ("auto", "torch", "loop")

    def named(*keys: str) -> Sequence[str]:
        return [key for key in keys if getattr(wanted, key) not in plain]

    takers = join_or([name for name in RULES if RULES[name].takes_kernel])
    for keys, has_effect, needed in (
        (named("swiglu"), kernels.gate, "model.activation=swiglu"),
        (named("rotary"), kernels.rotary, "model.positions=rotary"),
        (named("loss"), kernels.loss, "a loss in chunks (kernels.loss_chunk)"),
        (named("experts", "expert_rows"), bool(kernels.experts), "model.moe.experts"),
        (named("optimizer"), declaration(rule).takes_kernel, f"optimizer.rule={takers}"),
    ):
        if not has_effect:
            refuse_unused("kernels", wanted, keys, f"without {needed}")


def check_slice_times(config: Config, *, is_cut: bool) -> None:
    """Refuse times of slices where the schedule cuts no sequences."""
    if not is_cut:
        keys, why = ["slice_overhead", "slice_attention"], "where sequences are not cut"
        instead = ", or a pipeline.schedule with slices"
        refuse_unused("pipeline", config.pipeline, keys, why, instead)


def check_keep_attention(
    activations: ActivationsConfig, spans: Sequence[Sequence[BlockSpan]], again: Collection[int]
) -> None:
    """Refuse to keep results of attention where nothing that attends is recomputed."""
    policies = [span.policy for stage in spans for span in stage]
    attends = any({"block", "attention"} & policy.recompute for policy in policies)
    if not (attends or again):
        instead = ", or activations.policy=full, stage or selective with attention"
        why = "where attention is not run again"
        refuse_unused("activations", activations, ["keep_attention"], why, instead)
