"""Recording of consecutive update windows of an asynchronous schedule, without a barrier."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.engine.recorder import Record, Recorder, stream_timeline
from megapipe.observe.timeline import RecordedWindow
from megapipe.schedule.async_schedules.async_schedule import AsyncSchedule
from megapipe.schedule.async_schedules.excerpt import excerpt
from megapipe.schedule.async_schedules.programs import ProgramSegment
from megapipe.schedule.program import ActionKind


class Recording:
    """Records update windows of the schedule `stream`. `recorders`: one per local pipeline rank."""

    def __init__(self, stream: AsyncSchedule, recorders: Sequence[Recorder]) -> None:
        self._stream = stream
        self.after = max(1, stream.ahead)
        """Maximum number of update windows by which a rank can be ahead of another rank."""
        self._recorders = recorders
        self._first = self._end = 0
        self._windows: dict[int, tuple[int, ...]] = {}
        """Recorded update windows, which are consecutive, with each rank's number of operations."""

    def take(self, window: int, by_rank: Sequence[ProgramSegment]) -> None:
        """Record an update window. Keep earlier windows only if they directly precede it."""
        if window - 1 not in self._windows:
            self._windows.clear()
            for recorder in self._recorders:
                recorder.begin()
        self._windows[window] = tuple(
            sum(action.do == ActionKind.COMPUTE for action in part.program.actions)
            for part in by_rank
        )

    def begin(self, first: int, end: int) -> None:
        """Drop all records; the pipeline will be filled for update windows `first` to `end` - 1."""
        self._windows.clear()
        self._first, self._end = first, end

    def window(self, window: int, records: Sequence[Record]) -> RecordedWindow | None:
        """Return a window with its neighbours; None if dropped. `records`: all ranks' records."""
        if window not in self._windows:
            return None
        taken = [each for each in self._windows if window - 1 <= each <= window + self.after]
        begin, end = taken[0], taken[-1]
        before = [
            sum(counts[rank] for each, counts in self._windows.items() if each < begin)
            for rank in range(len(records))
        ]
        windows = self._end - self._first
        cut = excerpt(self._stream, windows, begin - self._first, end - self._first)
        return RecordedWindow(cut, window - begin, stream_timeline(cut, records, before))
