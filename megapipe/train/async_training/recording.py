"""Windows of a stream that are recorded one after the other, without a barrier between them."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.engine.recorder import Record, Recorder, stream_timeline
from megapipe.observe.timeline import RecordedWindow
from megapipe.schedule.program import ActionKind
from megapipe.schedule.streams.excerpt import excerpt
from megapipe.schedule.streams.programs import ProgramSegment
from megapipe.schedule.streams.stream import AsyncSchedule


class Recording:
    """The recorded windows of a `stream`, on the pipeline ranks of this process, which have
    `recorders`."""

    def __init__(self, stream: AsyncSchedule, recorders: Sequence[Recorder]) -> None:
        self._stream = stream
        self.after = max(1, stream.ahead)
        """Windows behind one that some rank may have begun before the first is through with it."""
        self._recorders = recorders
        self._first = self._end = 0
        self._windows: dict[int, tuple[int, ...]] = {}
        """Those without a gap between them: by rank, how many operations each has."""

    def take(self, window: int, by_rank: Sequence[ProgramSegment]) -> None:
        """Record a window; those before it are forgotten unless it follows on them."""
        if window - 1 not in self._windows:
            self._windows.clear()
            for recorder in self._recorders:
                recorder.begin()
        self._windows[window] = tuple(
            sum(action.do == ActionKind.COMPUTE for action in part.program.actions)
            for part in by_rank
        )

    def begin(self, first: int, end: int) -> None:
        """Forget all windows: a run of those from `first` to before `end` begins."""
        self._windows.clear()
        self._first, self._end = first, end

    def window(self, window: int, records: Sequence[Record]) -> RecordedWindow | None:
        """A window with those beside it, None if it is forgotten; `records` are of all ranks."""
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
