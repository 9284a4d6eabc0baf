"""The registered generators, by name."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Schedule

Generator = Callable[..., Schedule]
_GENERATORS: dict[str, Generator] = {}
_ALIASES: dict[str, str] = {}

SIZES = ("chunks", "slices")
OPTIONS = (
    *SIZES,
    "microbatch_group_size",
    "chimera_pairs",
    "ranks_per_stage",
    "extra_warmup",
)
"""Options that a generator can have besides ranks and microbatches. :func:`build` rejects an option
that the generator does not have."""
HINTS = ("cost", "activation_limit", "freed")
"""Options that suit every generator: :func:`build` drops those that a generator does not use."""


def register(name: str, *aliases: str) -> Callable[[Generator], Generator]:
    """Register the decorated generator as `name` and under the `aliases`.

    A generator has the parameters ``ranks`` and ``microbatches``. It can have any of these options,
    each with a default: ``chunks`` (virtual stages per rank), ``slices`` (per sequence),
    ``microbatch_group_size``, ``chimera_pairs``, ``ranks_per_stage`` (a number for each stage) and
    ``extra_warmup`` (additional warm-up forwards per rank). It can also use hints: ``cost`` (a
    :class:`~megapipe.schedule.cost.Cost`), ``activation_limit`` (the maximum number of
    micro-batches whose activations a rank has at once) and ``freed`` (the share of an activation
    that I frees; default 0). A generator returns a valid schedule for all arguments, or raises a
    ScheduleError. At each stage, operations that produce gradients are in micro-batch order.
    """

    def add(generator: Generator) -> Generator:
        for known in (name, *aliases):
            if known in _GENERATORS or known in _ALIASES:
                raise ValueError(f"a schedule named {known!r} is already registered")
        _GENERATORS[name] = generator
        _ALIASES.update(dict.fromkeys(aliases, name))
        return generator

    return add


def names() -> tuple[str, ...]:
    """Return the names of all registered schedules, sorted, without aliases."""
    return tuple(sorted(_GENERATORS))


def aliases() -> dict[str, str]:
    """Return the aliases of schedules, with the names that they stand for."""
    return dict(_ALIASES)


def generator_of(name: str) -> Generator:
    """Return the generator with a name or alias. Raises ScheduleError for an unknown name."""
    canonical = _ALIASES.get(name, name)
    if canonical not in _GENERATORS:
        known = [*_GENERATORS, *_ALIASES]
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ScheduleError(
            f"schedule {name!r} is unknown; {hint}the known ones are {', '.join(names())}"
        )
    return _GENERATORS[canonical]


def accepts(name: str) -> frozenset[str]:
    """Return the names of the parameters of a registered schedule's generator."""
    return frozenset(inspect.signature(generator_of(name)).parameters)


def build(name: str, *, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """Generate a registered schedule.

    Args:
        name: one of :func:`names` or :func:`aliases`.
        ranks: number of pipeline ranks.
        microbatches: number of whole micro-batches per step.
        options: values of :data:`OPTIONS` and :data:`HINTS`. None stands for the generator's
            default. A generator without the option chunks or slices accepts the value 1 for it.

    Raises:
        ScheduleError: an unknown name, or an option or value that the schedule does not support.
    """
    generator, taken = generator_of(name), accepts(name)
    sizes = {what: options.get(what) for what in OPTIONS}
    per_stage = sizes.pop("ranks_per_stage") or ()
    sizes |= {f"ranks_per_stage[{i}]": count for i, count in enumerate(per_stage)}
    unknown = sorted(set(options) - set(OPTIONS) - set(HINTS))
    if unknown:
        raise TypeError(f"build has no option {unknown[0]!r}")
    for what, count in {"ranks": ranks, "microbatches": microbatches, **sizes}.items():
        if count is not None and count < 1:
            raise ScheduleError(f"schedule {name}: {what} must be at least 1, not {count}")
    given = {}
    for what, value in options.items():
        if value is None:
            continue
        if what in taken:
            given[what] = value
        elif what in OPTIONS and not (what in SIZES and value == 1):
            able = " or ".join(other for other in names() if what in accepts(other))
            only = "must be 1" if what in SIZES else "must not be given"
            raise ScheduleError(f"schedule {name}: {what} {only}, not {value}; {able} supports it")
    return generator(ranks=ranks, microbatches=microbatches, **given)
