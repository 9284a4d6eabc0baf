"""Loading of schedules by name: registered, from a user-defined function, or from a file."""

from array import array
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.registry import (
    HINTS,
    OPTIONS,
    SIZES,
    accepts,
    aliases,
    build,
    names,
)
from megapipe.schedule.ir import Schedule
from megapipe.schedule.text import from_csv
from megapipe.util.user_code import UserCode

HASHABLE = (int, str, Fraction)
"""Types of options by which a schedule can be kept."""


def load(spec: str, *, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """Return the schedule that `spec` names, for these numbers of ranks and micro-batches.

    Args:
        spec: a registered name or alias; ``module:function``, imported with the current directory
            on the path and called with those of the other arguments that its signature takes; or
            ``path/to/file.csv`` (:func:`~megapipe.schedule.text.from_csv`).
        ranks: number of pipeline ranks.
        microbatches: number of whole micro-batches per step.
        options: options of :func:`~megapipe.schedule.generators.registry.build`; a user-defined
            function can take others too. A value of None counts as not given.

    Raises:
        ScheduleError: an unknown name, an exception in user code, or a schedule with other sizes
            than requested. Whether the schedule can be executed is not checked here;
            :func:`~megapipe.schedule.proof.validate.validate` does that.
    """
    given = {what: value for what, value in options.items() if value is not None}
    if spec.endswith(".csv"):
        _refuse(spec, given, taken=())
        schedule = _read(spec)
    elif ":" in spec:
        schedule = _call(spec, {"ranks": ranks, "microbatches": microbatches, **given})
    else:
        return _build(spec, ranks, microbatches, given)
    _check(spec, schedule, ranks, microbatches, given)
    return schedule


def takes_option(spec: str, option: str) -> bool:
    """Whether the schedule `spec` can depend on `option`, for example `cost`. A user-defined
    function can depend on every option, a file on none."""
    if spec in names() or spec in aliases():
        return option in accepts(spec)
    return is_user_schedule(spec) and not spec.endswith(".csv")


def is_user_schedule(spec: str) -> bool:
    """Whether `spec` is a user-defined function or a file. Such schedules must be proved."""
    return ":" in spec or spec.endswith(".csv")


def _build(name: str, ranks: int, microbatches: int, given: dict[str, Any]) -> Schedule:
    try:
        make = _kept if all(isinstance(each, HASHABLE) for each in given.values()) else build
        return make(name, ranks=ranks, microbatches=microbatches, **given)
    except ScheduleError as error:
        if name in names() or name in aliases():
            raise
        hint = "a schedule of your own is module:function or a file that ends in .csv"
        raise ScheduleError(f"{error}; {hint}") from None


@lru_cache(maxsize=128)
def _kept(name: str, **given: Any) -> Schedule:
    """Build a schedule, or return the one that was built before: a search needs each several times,
    and none is changed."""
    return build(name, **given)


def _read(path: str) -> Schedule:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"schedule {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"schedule {path}: it is not a text file") from None
    return from_csv(text, name=path)


def _call(spec: str, given: dict[str, Any]) -> Schedule:
    code = UserCode(spec, what="schedule", error=ScheduleError)
    if not code.takes_all:
        _refuse(spec, given, taken=tuple(code.parameters()))
    schedule: Schedule = code.call(given, ("ranks", "microbatches", *OPTIONS, *HINTS, *given))
    return schedule


def _refuse(spec: str, given: dict[str, Any], taken: tuple[str, ...]) -> None:
    """Raise ScheduleError for an option that is not in `taken`. Sizes and hints are not refused:
    the sizes of the schedule are checked later, and hints may be ignored."""
    for what in given:
        if what not in (*taken, *SIZES, *HINTS, "ranks", "microbatches"):
            raise ScheduleError(
                f"schedule {spec}: {what} must not be given, not {given[what]}; this schedule does "
                "not take it"
            )


def _check(
    spec: str, schedule: Schedule, ranks: int, microbatches: int, given: dict[str, Any]
) -> None:
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"schedule {spec}: it returned {type(schedule).__name__}; return a "
            "megapipe.schedule.ir.Schedule"
        )
    if not all(isinstance(ops, array) and ops.typecode == "q" for ops in schedule.ops):
        raise ScheduleError(
            f"schedule {spec}: its `ops` must be arrays of packed operations; make them with "
            "megapipe.schedule.ir.packed"
        )
    if schedule.forward_only:
        raise ScheduleError(f"schedule {spec}: it has no backward; leave out forward_only")
    placement = schedule.placement
    sizes: dict[str, tuple[Any, Any]] = {
        "ranks": (placement.ranks, ranks),
        "micro-batches": (schedule.whole_microbatches, microbatches),
    }
    if "chunks" in given:
        sizes["stages"] = (placement.stages, ranks * given["chunks"])
    if "slices" in given:
        sizes["slices"] = (schedule.slices, given["slices"])
    for what, (made, asked) in sizes.items():
        if made != asked:
            raise ScheduleError(f"schedule {spec}: it has {made} {what}, not the {asked} asked for")

    _check_parts(spec, schedule)


def _check_parts(spec: str, schedule: Schedule) -> None:
    filled = Fraction(0)
    for microbatch, size in enumerate(schedule.sizes or ()):
        filled += size
        if filled > 1:
            raise ScheduleError(
                f"schedule {spec}: with micro-batch {microbatch} its sizes add up to {filled} of a "
                "whole micro-batch; sizes of consecutive micro-batches must add up to 1"
            )
        filled %= 1
