"""Python's garbage collector, run at the same step on all ranks.

By default a process collects garbage when it has made a number of objects. So ranks do this in
different steps, and their peers wait each time. Objects from before the first step are not scanned
again. Tensors are freed without the collector, as a step leaves none in a reference cycle. A test
checks this.
"""

from __future__ import annotations

import gc


class GCControl:
    """Context in which garbage is collected only after steps that are multiples of `every`; 0:
    Python decides."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._was_on = True
        self._hidden = 0

    def __enter__(self) -> GCControl:
        self._was_on, self._hidden = gc.isenabled(), gc.get_freeze_count()
        if self.every:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def after(self, step: int) -> None:
        """Collect garbage, if that is due after step `step`, counted from 1."""
        if self.every and step % self.every == 0:
            gc.collect()

    def __exit__(self, *_: object) -> None:
        if self.every:
            if not self._hidden:  # else the caller has frozen objects, to share memory with forks
                gc.unfreeze()
            if self._was_on:
                gc.enable()
