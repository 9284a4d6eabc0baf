"""One micro-batch as a stage sees it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from megapipe.context.positions import Positions
from megapipe.context.split import LocalPositions
from megapipe.layers.scratch import Scratch
from megapipe.ops.documents import Documents


@dataclass(frozen=True)
class MicroBatch:
    """Rows of the global batch, and the coordinates that seed its random numbers.

    `tokens` is there on the first stage, `labels` and `mask` on the last one, each [b, s].
    """

    index: int
    """Number of the micro-batch in the global batch; it has the same rows in every layout."""
    step: int
    seed: int
    tokens: Tensor | None = None
    labels: Tensor | None = None
    mask: Tensor | None = None
    documents: Documents | None = None
    """Documents of the tokens up to the last one here; None: attention crosses documents."""
    by_source: Tensor | None = None
    """[n] fp64, of a mixture of n sources on the last stage, where `mask` is 0 or 1 + the source:
    takes the sum of the unmasked token losses of each. A loss of the user's leaves it NaN."""
    scale: float = 1.0
    """1 / unmasked tokens of the global batch (0 if there are none)."""
    position_scale: float = 0.0
    """1 / positions of the global batch, masked ones too, for terms of all of them; like `scale`
    times a loss scale."""
    first_row: int = 0
    """Number of the first row, where these are some of the micro-batch's rows."""
    sample: int = 0
    """Number of the first row in the global batch."""
    start: int = 0
    """Number of the first position among those here, where these are a slice of the sequence."""
    local_positions: LocalPositions | None = None
    """Which positions of the sequence are here, where it is split over context-parallel ranks; by
    default all, in order."""
    positions: Tensor | None = None
    """[s, b]: position of each token, where rows begin with padding (in generation) or positions
    begin anew in each document; by default they count from `start`."""
    sequence_length: int | None = None
    """Positions of the whole sequence that are here, given where it is cut into slices."""

    scratch: Scratch = field(default_factory=Scratch, compare=False)
    """Values of layers, kept until the step ends."""
    sequence_scratch: Scratch | None = field(default=None, compare=False)
    """Values of layers that all slices of the same sequences share; None: sequences are whole."""
    recompute_scratch: Scratch | None = field(default=None, compare=False)
    """Values that a first forward stores for its recomputation, freed with the graph; None where
    nothing is to be stored."""

    def storing_for_recompute(self) -> MicroBatch:
        """Return the same micro-batch with an empty `recompute_scratch`."""
        return replace(self, recompute_scratch=Scratch())

    def positions_of(self, rows: int) -> Positions:
        """The positions of so many rows of hidden states."""
        if self.local_positions is None:
            return Positions.whole(rows, self.start)
        return self.local_positions.own.rows(self.start, self.start + rows)
