"""Loads the schedule that a user names: a registered one, a function's, or a file's."""

from array import array
from fractions import Fraction
from pathlib import Path
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.registry import HINTS, OPTIONS, accepts, aliases, build, names
from megapipe.schedule.ir import Schedule
from megapipe.schedule.text import from_csv
from megapipe.util.user_code import UserCode


def load(spec: str, *, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """The schedule that `spec` names, for these many ranks and micro-batches.

    Args:
        spec: a registered name or alias; ``module:function``, imported with the current directory
            on the path and called with those of the other arguments that its signature takes; or
            ``path/to/file.csv`` (:func:`~megapipe.schedule.text.from_csv`).
        ranks: pipeline ranks.
        microbatches: micro-batches per step, whole ones.
        options: those of :func:`~megapipe.schedule.generators.registry.build`; None: not given.

    Raises:
        ScheduleError: nothing of that name, an exception in the user's code, or a schedule of
            other sizes than asked for. Whether the schedule can be executed is not checked here;
            :func:`~megapipe.schedule.proof.validate.validate` does that.
    """
    unknown = sorted(set(options) - set(OPTIONS) - set(HINTS))
    if unknown:
        raise TypeError(f"load has no option {unknown[0]!r}")
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


def goes_by(spec: str, option: str) -> bool:
    """Whether the schedule that :func:`load` returns for `spec` may depend on an option that it
    offers unasked, as `cost`; a user-defined function may use it."""
    if spec in names() or spec in aliases():
        return option in accepts(spec)
    return is_user_schedule(spec) and not spec.endswith(".csv")


def is_user_schedule(spec: str) -> bool:
    """Whether `spec` is a function or a file of the user's, whose schedules must be proved."""
    return ":" in spec or spec.endswith(".csv")


def _build(name: str, ranks: int, microbatches: int, given: dict[str, Any]) -> Schedule:
    try:
        return build(name, ranks=ranks, microbatches=microbatches, **given)
    except ScheduleError as error:
        if name in names() or name in aliases():
            raise
        hint = "one of your own is module:function or a file that ends in .csv"
        raise ScheduleError(f"{error}; {hint}") from None


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
    schedule: Schedule = code.call(given, ("ranks", "microbatches", *OPTIONS, *HINTS))
    return schedule


def _refuse(spec: str, given: dict[str, Any], taken: tuple[str, ...]) -> None:
    """Refuse options that are not taken and whose effect the result would not show."""
    for what in ("group", "pairs", "replicas", "advance"):
        if what in given and what not in taken:
            raise ScheduleError(
                f"schedule {spec}: {what} must not be given, not {given[what]}; it does not take it"
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
            f"schedule {spec}: its lists of operations must be arrays of packed ones, as "
            "megapipe.schedule.ir.packed makes them"
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
                f"schedule {spec}: with micro-batch {microbatch} there is {filled} of a whole one; "
                "the parts of a whole are consecutive and add up to 1"
            )
        filled %= 1
