"""The registered generators, by name."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Schedule

Generator = Callable[..., Schedule]
_GENERATORS: dict[str, Generator] = {}


def register(name: str) -> Callable[[Generator], Generator]:
    """Decorator: make a generator known as `name`.

    A generator takes ``ranks`` and ``microbatches``, and ``chunks`` or ``group`` where it has
    them (a parameter it lacks is refused for it), and returns a schedule that is valid for every
    argument it does not refuse with a ScheduleError. Its gradient-producing operations are in
    micro-batch order at each stage.
    """

    def add(generator: Generator) -> Generator:
        if name in _GENERATORS:
            raise ValueError(f"a schedule named {name!r} is already registered")
        _GENERATORS[name] = generator
        return generator

    return add


def names() -> tuple[str, ...]:
    """Names of all registered schedules, sorted."""
    return tuple(sorted(_GENERATORS))


def accepts(name: str) -> frozenset[str]:
    """The parameters of a registered schedule, out of ranks, microbatches, chunks, group."""
    return frozenset(inspect.signature(_find(name)).parameters)


def build(
    name: str, *, ranks: int, microbatches: int, chunks: int = 1, group: int | None = None
) -> Schedule:
    """Generate a registered schedule.

    Args:
        name: one of :func:`names`.
        ranks: pipeline ranks.
        microbatches: micro-batches per step.
        chunks: virtual stages per rank.
        group: micro-batches per group (``interleaved_1f1b``); None: the schedule's default.

    Raises:
        ScheduleError: an unknown name, or a number that the schedule cannot have.
    """
    generator = _find(name)
    for what, count in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if count < 1:
            raise ScheduleError(f"schedule {name}: {what} must be at least 1, not {count}")
    options = {"chunks": chunks} if chunks != 1 else {}
    if group is not None:
        options["group"] = group
    for option, value in options.items():
        if option not in accepts(name):
            able = " or ".join(other for other in names() if option in accepts(other))
            only = "must be 1" if option == "chunks" else "must not be given"
            raise ScheduleError(f"schedule {name}: {option} {only}, not {value}; {able} has it")
    return generator(ranks=ranks, microbatches=microbatches, **options)


def _find(name: str) -> Generator:
    if name not in _GENERATORS:
        near = get_close_matches(name, _GENERATORS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ScheduleError(
            f"schedule {name!r} is unknown; {hint}the known ones are {', '.join(names())}"
        )
    return _GENERATORS[name]
