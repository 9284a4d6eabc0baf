"""The lengths of a configuration's slices, and the model of time by which they are chosen."""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cache

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.context_checks import length_multiple, split_of
from megapipe.layout.slice_time import SliceCost
from megapipe.layout.slices import balanced_slices, fastest_slices
from megapipe.model.interface import ModelSpec
from megapipe.schedule.cost import Cost


def slice_time(config: Config, family: ModelSpec) -> SliceCost:
    """The times of slices of a resolved model, as ``pipeline.slice_*`` say."""
    pipeline = config.pipeline
    return SliceCost(
        cache(family.causal_flops),
        Fraction(str(pipeline.slice_overhead or 0)),
        Fraction(str(pipeline.slice_attention)),
    )


def is_cut_by_time(config: Config) -> bool:
    """Whether sequences are cut by :func:`fastest_slices_for`."""
    return config.pipeline.schedule == "terapipe" and config.pipeline.slice_overhead is not None


def fastest_slices_for(
    config: Config, family: ModelSpec, microbatches: int, cost: Cost
) -> tuple[int, ...]:
    """Lengths of the slices of terapipe by dynamic programming.

    `cost` is that of the stages. A pipeline of unequal stages counts as one of fewer equal stages,
    each as slow as the slowest. Raises :class:`ConfigError` for too many slices.
    """
    assert isinstance(cost.F, tuple)
    F, B, *_ = cost.table(len(cost.F))
    with _naming_keys():
        return fastest_slices(
            slice_time(config, family),
            config.train.sequence_length,
            Fraction(sum(F) + sum(B)) / Fraction(max(F) + max(B)),
            count=config.pipeline.slices,
            microbatches=microbatches,
            multiple=multiple_of(config),
        )


def balanced_slices_for(config: Config, family: ModelSpec, slices: int) -> tuple[int, ...]:
    """Lengths of `slices` slices of equal times. Raises :class:`ConfigError` for too many."""
    length = config.train.sequence_length
    if slices == 1:
        return (length,)
    with _naming_keys():
        first = slice_time(config, family).first
        return balanced_slices(first, length, slices, multiple_of(config))


def check_timeable(config: Config, slices: int) -> None:
    """Refuse to time slices (``--time-slices``) of uncut or very short sequences."""
    length, least = config.train.sequence_length, 4 * multiple_of(config)
    if config.parallel.cp > 1:
        raise ConfigError(
            f"--time-slices: parallel.cp={config.parallel.cp}: times are of one process' slices: "
            "expected 1"
        )
    if slices == 1:
        raise ConfigError(
            f"--time-slices: pipeline.schedule={config.pipeline.schedule} does not cut sequences "
            "here: expected one that does, as seq1f1b, and pipeline.slices above 1"
        )
    if length < least:
        raise ConfigError(
            f"--time-slices: train.sequence_length={length} is too short: expected at least {least}"
        )


def multiple_of(config: Config) -> int:
    """The number that divides every slice length."""
    return length_multiple(config, split_of(config))


@contextmanager
def _naming_keys() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"pipeline.{error}; see train.sequence_length") from None
