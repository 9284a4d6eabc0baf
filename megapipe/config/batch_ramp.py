"""The global batch of each step, which may grow in the first part of a run.

Early in training the gradients of many samples point the same way, so small batches learn as much
from fewer samples: GPT-3 grew its batch over the first billions of tokens (Brown et al.,
2005.14165). The batch is a function of the samples consumed so far, as in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Sequence


class BatchRamp:
    """Global batches of `start`, `start` + `increment`, ... up to `final` samples.

    Each size except `final` is kept for an equal share of the first `samples` samples, until the
    end of the step in which that share is reached.

    Args:
        final: the global batch at the end.
        ramp: `start`, `increment` and `samples`; None: all steps have the final batch.
    """

    def __init__(self, final: int, ramp: Sequence[int] | None = None) -> None:
        start, increment, samples = ramp or (final, 1, 0)
        self.sizes = (*range(start, final, increment), final)
        self._share = samples / max(len(self.sizes) - 1, 1)
        """Number of samples for which each size except the final one is kept; not always whole."""

    def batch_at(self, samples: int) -> int:
        """Return the global batch of the step that begins after `samples` consumed samples."""
        if len(self.sizes) == 1:
            return self.sizes[0]
        return self.sizes[min(int(samples / self._share), len(self.sizes) - 1)]

    def after(self, samples: int, steps: int) -> int:
        """Return the number of samples that are consumed after `steps` further steps, if `samples`
        are consumed now."""
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
