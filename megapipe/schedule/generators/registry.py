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

OPTIONS = ("chunks", "group", "slices", "pairs", "replicas", "advance")
"""Options that a generator may take besides ranks and microbatches; others are refused."""
HINTS = ("cost", "memory_limit", "freed")
"""Hints that a generator may go by; those that do not, ignore them."""


def register(name: str, *aliases: str) -> Callable[[Generator], Generator]:
    """Decorator: make a generator known as `name`, and under further names.

    A generator takes ``ranks`` and ``microbatches``, and may take any of these, each with a
    default: ``chunks`` (virtual stages per rank), ``group``, ``slices``, ``pairs``, ``replicas``
    (ranks per stage, one number each), ``advance`` (forwards further ahead); ``cost`` (a
    :class:`~megapipe.schedule.cost.Cost`), ``memory_limit`` (micro-batches of a full rank) and
    ``freed`` (the share of an activation that the limit counts as free after I; 0). It returns a
    schedule that is valid for every argument that it does not refuse with a ScheduleError. Its
    gradient-producing operations are in micro-batch order at each stage.
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
    """Names of all registered schedules, sorted, without aliases."""
    return tuple(sorted(_GENERATORS))


def aliases() -> dict[str, str]:
    """Further names of schedules, and whose they are."""
    return dict(_ALIASES)


def generator_of(name: str) -> Generator:
    """The function behind a name or an alias; ScheduleError for an unknown one."""
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
    """The parameters of a registered schedule."""
    return frozenset(inspect.signature(generator_of(name)).parameters)


def build(name: str, *, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """Generate a registered schedule.

    Args:
        name: one of :func:`names` or :func:`aliases`.
        ranks: pipeline ranks.
        microbatches: micro-batches per step, whole ones.
        options: of :data:`OPTIONS` and :data:`HINTS`; None: the schedule's default. One chunk
            and one slice are what a schedule without chunks and slices has.

    Raises:
        ScheduleError: an unknown name, or a number that the schedule cannot have.
    """
    generator, taken = generator_of(name), accepts(name)
    sizes = {what: options.get(what) for what in OPTIONS}
    sizes |= {f"replicas[{i}]": count for i, count in enumerate(sizes.pop("replicas") or ())}
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
        elif what in OPTIONS and not (what in ("chunks", "slices") and value == 1):
            able = " or ".join(other for other in names() if what in accepts(other))
            only = "must be 1" if what in ("chunks", "slices") else "must not be given"
            raise ScheduleError(f"schedule {name}: {what} {only}, not {value}; {able} has it")
    return generator(ranks=ranks, microbatches=microbatches, **given)
