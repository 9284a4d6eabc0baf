"""Python's garbage collector, at the same step on all ranks.

By itself it runs when a process has made so many objects, each rank in another step; its peers wait
for it every time. What is there before the first step stays, and need not be looked at again.
Tensors do not wait for it: a step leaves none in a cycle of references, which a test holds.
"""

from __future__ import annotations

import gc


class Garbage:
    """Collects after every so many steps and at no other time, while it is entered; 0: leaves it to
    Python."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._was_on = True

    def __enter__(self) -> Garbage:
        self._was_on = gc.isenabled()
        if self.every:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def after(self, step: int) -> None:
        """After step `step`, counted from 1."""
        if self.every and step % self.every == 0:
            gc.collect()

    def __exit__(self, *_: object) -> None:
        if self.every:
            gc.unfreeze()
            if self._was_on:
                gc.enable()
