"""What operations and messages cost, in any unit of time."""

from dataclasses import dataclass
from fractions import Fraction

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Kind

Time = int | float | Fraction
"""Whole numbers and fractions stay exact through the simulator."""


@dataclass(frozen=True)
class Cost:
    """Time of one operation at one virtual stage: a number for all stages, or one per stage."""

    F: Time | tuple[Time, ...] = 1
    I: Time | tuple[Time, ...] = 1  # noqa: E741
    W: Time | tuple[Time, ...] = 1
    B: Time | tuple[Time, ...] | None = None
    """The fused backward; default: I + W."""
    latency: Time = 0
    """From the end of an operation to the arrival of its message on another rank; it keeps
    neither rank busy, and hand-over within a rank is free."""

    def table(self, stages: int) -> tuple[tuple[Time, ...], ...]:
        """Times by kind (F, B, I, W) and stage.

        Raises:
            ScheduleError: a tuple that is not of length stages, or a negative time.
        """
        given = {"F": self.F, "I": self.I, "W": self.W, "latency": self.latency}
        if self.B is not None:
            given["B"] = self.B
        rows: dict[str, tuple[Time, ...]] = {}
        for name, value in given.items():
            rows[name] = value if isinstance(value, tuple) else (value,) * stages
            if len(rows[name]) != stages:
                raise ScheduleError(
                    f"cost {name}: {len(rows[name])} times for {stages} stages; give one per stage"
                )
            if min(rows[name]) < 0:
                raise ScheduleError(f"cost {name}: {min(rows[name])} is negative")
        fused = tuple(i + w for i, w in zip(rows["I"], rows["W"], strict=True))
        return tuple(rows.get(kind.name, fused) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
