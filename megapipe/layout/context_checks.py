"""Keys that do not go together with context parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.config.config import Config
from megapipe.config.context import ContextConfig
from megapipe.context.split import PositionSplit
from megapipe.errors import ConfigError
from megapipe.words import divisors_hint, join_or, nearest_multiples

WITH_LSE = ("auto", "flash", "efficient", "cudnn", "flash_attn")
"""Kernels of attention whose results over some keys can be merged with those over others."""


LARGEST_RING = 512
"""Ranks whose plan takes no minutes to make: it grows with their square."""


def split_of(config: Config) -> PositionSplit:
    """How a configuration splits positions. Raises :class:`ConfigError` where it cannot."""
    cp, context = config.parallel.cp, config.context
    if cp % context.ulysses:
        raise ConfigError(
            f"context.ulysses={context.ulysses} does not divide parallel.cp={cp}: "
            f"{divisors_hint('ulysses', cp, context.ulysses)}"
        )
    return PositionSplit(
        ring=cp // context.ulysses,
        ulysses=context.ulysses,
        order=context.order,
        heads_first=context.ranks == "heads_first",
    )


def check_context(config: Config, split: PositionSplit, slices: int) -> None:
    """Raise :class:`ConfigError` for what context parallelism cannot do."""
    context, where = config.context, f"parallel.cp={split.cp}"
    if split.cp == 1 and config.activations.keep_attention:
        where = "activations.keep_attention=true"
    elif split.cp == 1:
        return
    _check_plan(config.context, split)
    _check_model(config, where)
    _check_heads(config, split)
    _check_length(config, split)
    if slices > 1:
        _check_slices(context)
    if context.order == "striped" and config.data.masks_documents:
        raise ConfigError(
            "context.order=striped does not go with attention that ends at documents "
            "(data.document_mask, or data.samples that are packed): expected zigzag or contiguous"
        )
    kernel = config.kernels.attention
    if kernel not in WITH_LSE:
        raise ConfigError(
            f"{where} needs sums of exponentials, which kernels.attention={kernel} does not give: "
            f"expected {', '.join(WITH_LSE[:-1])} or {WITH_LSE[-1]}"
        )
    model = config.model
    if kernel != "auto" and (model.attention_softcap is not None or model.positions == "alibi"):
        raise ConfigError(
            f"{where}: kernels.attention={kernel} has no scores that are soft-capped or less by "
            "distance (model.attention_softcap, model.positions=alibi): expected auto"
        )


def _check_plan(context: ContextConfig, split: PositionSplit) -> None:
    n = split.ring
    if n > LARGEST_RING:
        raise ConfigError(
            f"parallel.cp={split.cp} with context.ulysses={split.ulysses} is a ring of {n} ranks: "
            f"expected at most {LARGEST_RING}; more context.ulysses makes it smaller"
        )
    inner = [d for d in range(2, n) if n % d == 0]
    if context.plan == "double_ring" and context.inner not in inner:
        raise ConfigError(
            f"context.inner={_null(context.inner)} does not divide the ring of {n} into several, "
            f"as context.plan=double_ring needs: {_fitting('inner', inner)}"
        )
    team = [c for c in range(2, n) if n % c**2 == 0]
    if context.plan == "teams" and context.team not in team:
        raise ConfigError(
            f"context.team={_null(context.team)}: its square does not divide the ring of {n}, as "
            f"context.plan=teams needs: {_fitting('team', team)}"
        )
    if context.plan == "helpers" and context.order != "contiguous":
        raise ConfigError(
            f"context.order={context.order}: context.plan=helpers is for blocks of which the last "
            "is the most work; expected contiguous"
        )


def _check_slices(context: ContextConfig) -> None:
    """Refuse what cannot attend from one slice of a sequence to those before it."""
    for key, value, wrong, expected in (
        ("order", context.order, ("striped",), "zigzag or contiguous"),
        ("plan", context.plan, ("helpers", "teams"), "ring, double_ring, all_gather or your own"),
    ):
        if value in wrong:
            raise ConfigError(
                f"context.{key}={value} does not go with slices of sequences, which "
                f"pipeline.schedule makes: expected {expected}"
            )


def _fitting(name: str, values: Sequence[int]) -> str:
    return f"{name} could be {join_or(values)}" if values else "expected context.plan=ring"


def _null(value: int | None) -> str:
    return "null" if value is None else str(value)


def _check_model(config: Config, where: str) -> None:
    model = config.model
    for wrong, expected in (
        (model.dropout, f"model.dropout=0, not {model.dropout:g}"),
        (model.window, f"model.window=null, not {model.window}"),
    ):
        if wrong:
            raise ConfigError(f"{where} needs {expected}")


def _check_heads(config: Config, split: PositionSplit) -> None:
    n, tp = split.ulysses, config.parallel.tp
    heads, groups = config.model.heads // tp, (config.model.kv_heads or 1) // tp
    each = f" / parallel.tp={tp}" if tp > 1 else ""
    if heads % n:
        raise ConfigError(
            f"context.ulysses={n} does not divide model.heads{each} = {heads}: "
            f"{divisors_hint('ulysses', heads, n)}"
        )
    if groups % n and n % groups:
        raise ConfigError(
            f"context.ulysses={n} and model.kv_heads{each} = {groups}: expected one to divide the "
            "other"
        )


def length_multiple(config: Config, split: PositionSplit) -> int:
    """The number that divides the length of every sequence, or slice: ranks of cp, and of tp under
    sequence parallelism, have equal parts of it."""
    return split.multiple * (config.parallel.tp if config.parallel.sequence_parallel else 1)


def _check_length(config: Config, split: PositionSplit) -> None:
    tp = config.parallel.tp if config.parallel.sequence_parallel else 1
    length, multiple = config.train.sequence_length, length_multiple(config, split)
    if length % multiple:
        parts = f"parallel.cp={split.cp}"
        parts += f" and parallel.tp={tp}" if tp > 1 else ""
        order = f" in context.order={split.order}" if split.ring > 1 else ""
        raise ConfigError(
            f"train.sequence_length={length} is not divisible by {multiple}, as {parts}{order} "
            f"need: {nearest_multiples(length, multiple)}"
        )
