"""The global batch of each step, which may grow in the first part of a run.

Early in training gradients point the same way for many samples, so small batches learn as much
from fewer of them: GPT-3 grew its batch over the first billions of tokens (Brown et al.,
2005.14165). The batch is a function of the samples consumed so far, as in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Sequence


class BatchRamp:
    """Batches of `start`, `start` + `increment`, ... up to `final` samples.

    Each size but the last is kept for an equal share of the first `samples` samples, and to the end
    of the step in which that is reached.

    Args:
        final: the global batch of the end.
        ramp: `start`, `increment` and `samples`; None: all steps have the final one.
    """

    def __init__(self, final: int, ramp: Sequence[int] | None = None) -> None:
        start, increment, samples = ramp or (final, 1, 0)
        self.sizes = (*range(start, final, increment), final)
        self._share = samples / max(len(self.sizes) - 1, 1)
        """Samples of each size but the last, which need not be whole."""

    def batch_at(self, samples: int) -> int:
        """The batch of a step that begins when `samples` are consumed."""
        if len(self.sizes) == 1:
            return self.sizes[0]
        return self.sizes[min(int(samples / self._share), len(self.sizes) - 1)]

    def after(self, samples: int, steps: int) -> int:
        """Samples consumed after so many steps more."""
        while steps > 0:
            batch = self.batch_at(samples)
            number = self.sizes.index(batch)
            if batch == self.sizes[-1]:
                return samples + steps * batch
            until = (number + 1) * self._share
            some = max(min(steps, int((until - samples) // batch)), 1)
            samples += some * batch
            steps -= some
        return samples
