"""Python's garbage collector, at the same step on all ranks.

By default it runs when a process has made so many objects, on each rank in another step, and peers
wait for that rank every time. Objects from before the first step are not looked at again. Tensors
are freed without it: a step leaves none in a cycle of references, which a test holds.
"""

from __future__ import annotations

import gc


class GCControl:
    """A context in which garbage is collected after every `every` steps and at no other time; 0:
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
        """Collect, if it is time for it after step `step`, counted from 1."""
        if self.every and step % self.every == 0:
            gc.collect()

    def __exit__(self, *_: object) -> None:
        if self.every:
            if not self._hidden:  # by a process that shares its memory with its forks
                gc.unfreeze()
            if self._was_on:
                gc.enable()
