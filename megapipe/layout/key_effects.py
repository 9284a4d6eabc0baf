"""Checks of keys whose effect depends on the resolved model, schedule or block policies."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megapipe.config.activations import ActivationsConfig
from megapipe.config.config import Config
from megapipe.config.unused_keys import refuse_unused
from megapipe.config.update_rules import RULES, declaration
from megapipe.errors import ConfigError
from megapipe.layers.activation_policy import BlockSpan
from megapipe.model.kernel_needs import KernelNeeds
from megapipe.text import join_or


def check_kernels(config: Config, kernels: KernelNeeds, name: str) -> None:
    """Refuse kernels in ``kernels.only`` that the model `name` does not call.

    A configuration may request torch's kernels for all operations, so these are accepted. But if
    the model calls none of megapipe's kernels for attention or norms, any request there is refused.
    """
    wanted, rule = config.kernels.only, config.optimizer.rule
    lacking = [key for key in ("attention", "norm") if getattr(kernels, key) is None]
    refuse_unused(
        "kernels.only", wanted, lacking, f"with {name}, which calls none of megapipe's", ""
    )
    plain = ("auto", "torch", "loop")

    def named(*keys: str) -> Sequence[str]:
        return [key for key in keys if getattr(wanted, key) not in plain]

    takers = join_or([name for name in RULES if RULES[name].takes_kernel])
    for keys, has_effect, needed in (
        (named("swiglu"), kernels.gate, "model.activation=swiglu"),
        (named("rotary"), kernels.rotary, "model.positions=rotary"),
        (named("loss"), kernels.loss, "a loss in chunks (kernels.loss_chunk_tokens)"),
        (named("expert_gemm", "moe_elementwise"), bool(kernels.experts), "model.moe.num_experts"),
        (named("optimizer"), declaration(rule).takes_kernel, f"optimizer.rule={takers}"),
    ):
        if not has_effect:
            refuse_unused("kernels.only", wanted, keys, f"without {needed}")


def check_slice_times(config: Config, *, is_cut: bool) -> None:
    """Refuse keys about the time that slices take if the schedule does not cut sequences."""
    if is_cut:
        return
    why, instead = "where sequences are not cut", "a pipeline.schedule with slices"
    refuse_unused("pipeline", config.pipeline, ["slice_attention_cost"], why, f", or {instead}")
    overhead = config.pipeline.generator_options.slice_overhead_tokens
    if overhead is not None:
        raise ConfigError(
            f"pipeline.options.slice_overhead_tokens={overhead:g} has no effect {why}: expected "
            f"null, or {instead}"
        )


def check_keep_attention(
    activations: ActivationsConfig,
    spans: Sequence[Sequence[BlockSpan]],
    recomputed: Collection[int],
) -> None:
    """Refuse ``activations.keep_attention`` if attention is never recomputed: neither in a block of
    `spans` nor with a whole stage of `recomputed`."""
    policies = [span.policy for stage in spans for span in stage]
    attends = any({"block", "attention"} & policy.recompute for policy in policies)
    if not (attends or recomputed):
        instead = ", or activations.policy=full, stage or selective with attention"
        why = "where attention is not recomputed"
        refuse_unused("activations", activations, ["keep_attention"], why, instead)
