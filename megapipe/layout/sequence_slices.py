"""Chooses the lengths of a sequence's slices."""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cache

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.context_checks import length_multiple, split_of
from megapipe.layout.slice_cost import SliceCost
from megapipe.layout.slice_search import balanced_slices, fastest_slices
from megapipe.model.interface import ModelSpec
from megapipe.schedule.cost import Cost


def slice_time(config: Config, family: ModelSpec) -> SliceCost:
    """Return the model of a slice's time, from the FLOPs of a resolved model and keys of the
    section `pipeline`."""
    pipeline = config.pipeline
    return SliceCost(
        cache(family.causal_flops),
        Fraction(str(pipeline.generator_options.slice_overhead_tokens or 0)),
        Fraction(str(pipeline.slice_attention_cost)),
    )


def is_cut_by_time(config: Config) -> bool:
    """Whether dynamic programming chooses the slices: terapipe with an overhead per slice."""
    overhead = config.pipeline.generator_options.slice_overhead_tokens
    return config.pipeline.schedule == "terapipe" and overhead is not None


def fastest_slices_for(
    config: Config, family: ModelSpec, microbatches: int, cost: Cost
) -> tuple[int, ...]:
    """Choose the lengths of terapipe's slices by dynamic programming.

    `cost`: costs of the stages. The search assumes equal stages, so a pipeline of unequal stages
    counts as fewer stages that are all as slow as the slowest. Raises :class:`ConfigError` for too
    many slices.
    """
    assert isinstance(cost.F, tuple)
    F, B, *_ = cost.table(len(cost.F))
    with _naming_keys():
        return fastest_slices(
            slice_time(config, family),
            config.train.sequence_length,
            Fraction(sum(F) + sum(B)) / Fraction(max(F) + max(B)),
            count=config.pipeline.sequence_slices,
            microbatches=microbatches,
            multiple=multiple_of(config),
        )


def balanced_slices_for(config: Config, family: ModelSpec, slices: int) -> tuple[int, ...]:
    """Return the lengths of `slices` slices of equal times. Raises :class:`ConfigError` if a
    sequence is too short for that many slices."""
    length = config.train.sequence_length
    if slices == 1:
        return (length,)
    with _naming_keys():
        first = slice_time(config, family).first
        return balanced_slices(first, length, slices, multiple_of(config))


def check_timeable(config: Config, slices: int) -> None:
    """Refuse ``--time-slices`` if sequences are not cut, or are very short."""
    length, least = config.train.sequence_length, 4 * multiple_of(config)
    if config.parallel.cp > 1:
        raise ConfigError(
            f"--time-slices: parallel.cp={config.parallel.cp}: the slices of one process are "
            "measured: expected parallel.cp=1"
        )
    if slices == 1:
        raise ConfigError(
            f"--time-slices: pipeline.schedule={config.pipeline.schedule} does not cut "
            "sequences: expected one that does, as in seq1f1b, and pipeline.sequence_slices "
            "above 1"
        )
    if length < least:
        raise ConfigError(
            f"--time-slices: train.sequence_length={length} is too short: expected at least {least}"
        )


def multiple_of(config: Config) -> int:
    """Return the number that must divide every slice length."""
    return length_multiple(config, split_of(config))


@contextmanager
def _naming_keys() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"pipeline.{error}; see train.sequence_length") from None
