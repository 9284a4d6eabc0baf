"""Checks of keys that conflict with context parallelism (``parallel.cp`` above 1)."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.config.config import Config
from megapipe.config.context import ContextConfig
from megapipe.context.split import PositionSplit
from megapipe.errors import ConfigError
from megapipe.model.kernel_needs import AttentionNeeds
from megapipe.text import count_noun, divisors_hint, join_or, nearest_multiples

WITH_LSE = ("auto", "flash", "efficient", "cudnn", "flash_attn")
"""Attention kernels that return the log-sum-exp, with which partial results are merged."""


LARGEST_RING = 512
"""Maximum number of ranks of a ring. The time to plan a ring grows with the square of its ranks."""


def split_of(config: Config) -> PositionSplit:
    """Return a configuration's position split. Raises :class:`ConfigError` if it is impossible."""
    cp, context = config.parallel.cp, config.context
    if cp % context.ulysses:
        raise ConfigError(
            f"context.ulysses={context.ulysses} does not divide parallel.cp={cp}: "
            f"{divisors_hint('ulysses', cp, context.ulysses)}"
        )
    return PositionSplit(
        ring=cp // context.ulysses,
        ulysses=context.ulysses,
        order=context.position_split,
        heads_first=context.rank_order == "heads_first",
    )


def check_context(
    config: Config, split: PositionSplit, slices: int, attention: AttentionNeeds | None
) -> None:
    """Raise :class:`ConfigError` for settings that context parallelism does not support.

    `attention`: sizes of the model's attention; None: it has none that megapipe computes.
    """
    context, setting = config.context, f"parallel.cp={split.cp}"
    if split.cp == 1 and config.activations.keep_attention:
        setting = "activations.keep_attention=true"
    elif split.cp == 1:
        return
    _check_plan(config.context, split)
    _check_model(config, setting)
    if attention is not None:
        _check_heads(attention, split.ulysses)
    _check_length(config, split)
    if slices > 1:
        _check_slices(context)
    if context.position_split == "striped" and config.data.masks_documents:
        raise ConfigError(
            "context.position_split=striped is not possible with attention within documents "
            "(data.document_mask, or a packed data.sample_format): expected zigzag or "
            "contiguous"
        )
    kernel = config.kernels.only.attention
    if kernel not in WITH_LSE:
        raise ConfigError(
            f"{setting} needs the log-sum-exp of attention, which "
            f"kernels.only.attention={kernel} does not return: expected "
            f"{', '.join(WITH_LSE[:-1])} or {WITH_LSE[-1]}"
        )
    model = config.model
    if kernel != "auto" and (model.attention_softcap is not None or model.positions == "alibi"):
        raise ConfigError(
            f"{setting}: kernels.only.attention={kernel} has no soft-capped or distance-biased "
            "scores (model.attention_softcap, model.positions=alibi): expected auto"
        )


def _check_plan(context: ContextConfig, split: PositionSplit) -> None:
    n = split.ring
    if n > LARGEST_RING:
        raise ConfigError(
            f"parallel.cp={split.cp} with context.ulysses={split.ulysses} is a ring of {n} "
            f"ranks: expected at most {LARGEST_RING}, with a larger context.ulysses"
        )
    inner = [d for d in range(2, n) if n % d == 0]
    if context.algorithm == "double_ring" and context.inner_ring_size not in inner:
        raise ConfigError(
            f"context.inner_ring_size={_null(context.inner_ring_size)} does not divide the ring of "
            f"{n} into several, as context.algorithm=double_ring needs: "
            f"{_fitting('inner_ring_size', inner)}"
        )
    team = [c for c in range(2, n) if n % c**2 == 0]
    if context.algorithm == "teams" and context.team_size not in team:
        raise ConfigError(
            f"context.team_size={_null(context.team_size)}: its square does not divide the ring of "
            f"{n}, as context.algorithm=teams needs: {_fitting('team_size', team)}"
        )
    if context.algorithm == "helpers" and context.position_split != "contiguous":
        raise ConfigError(
            f"context.position_split={context.position_split}: context.algorithm=helpers "
            "needs a last block with the most work: expected contiguous"
        )


def _check_slices(context: ContextConfig) -> None:
    """Refuse settings with which a slice of a sequence cannot attend to the slices before it."""
    for key, value, wrong, expected in (
        ("position_split", context.position_split, ("striped",), "zigzag or contiguous"),
        (
            "algorithm",
            context.algorithm,
            ("helpers", "teams"),
            "ring, double_ring, all_gather or a user function",
        ),
    ):
        if value in wrong:
            raise ConfigError(
                f"context.{key}={value} is not possible with a pipeline.schedule that cuts "
                f"sequences into slices: expected {expected}"
            )


def _fitting(name: str, values: Sequence[int]) -> str:
    return f"{name} could be {join_or(values)}" if values else "expected context.algorithm=ring"


def _null(value: int | None) -> str:
    return "null" if value is None else str(value)


def _check_model(config: Config, setting: str) -> None:
    model = config.model
    for wrong, expected in (
        (model.dropout, f"model.dropout=0, not {model.dropout:g}"),
        (model.sliding_window, f"model.sliding_window=null, not {model.sliding_window}"),
    ):
        if wrong:
            raise ConfigError(f"{setting} needs {expected}")


def _check_heads(attention: AttentionNeeds, n: int) -> None:
    """Refuse a number `n` of Ulysses ranks that does not divide the heads."""
    heads, groups = attention.heads, attention.groups
    if heads % n:
        raise ConfigError(
            f"context.ulysses={n} does not divide the {count_noun(heads, 'query head')} of a "
            f"tensor-parallel rank: {divisors_hint('ulysses', heads, n)}"
        )
    if groups % n and n % groups:
        raise ConfigError(
            f"context.ulysses={n} and the {count_noun(groups, 'KV head')} of a tensor-parallel "
            "rank: expected one to divide the other"
        )


def length_multiple(config: Config, split: PositionSplit) -> int:
    """Return the number that must divide the length of every sequence and every slice, so that all
    cp ranks (with sequence parallelism, all cp x tp ranks) hold equally many positions."""
    return split.multiple * (config.parallel.tp if config.parallel.sequence_parallel else 1)


def _check_length(config: Config, split: PositionSplit) -> None:
    tp = config.parallel.tp if config.parallel.sequence_parallel else 1
    length, multiple = config.train.sequence_length, length_multiple(config, split)
    if length % multiple:
        parts = f"parallel.cp={split.cp}"
        parts += f" and parallel.tp={tp}" if tp > 1 else ""
        order = f" in context.position_split={split.order}" if split.ring > 1 else ""
        raise ConfigError(
            f"train.sequence_length={length} is not divisible by {multiple}, as {parts}{order} "
            f"need: {nearest_multiples(length, multiple)}"
        )
