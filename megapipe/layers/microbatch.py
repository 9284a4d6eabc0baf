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
    """Samples that pass a stage together, and the coordinates that seed their random numbers.

    `tokens` exist on the first stage, `labels` and `mask` on the last one, each [b, s].
    """

    index: int
    """Index of the micro-batch in the global batch; its samples are the same in every layout."""
    step: int
    seed: int
    tokens: Tensor | None = None
    labels: Tensor | None = None
    mask: Tensor | None = None
    documents: Documents | None = None
    """Documents of all tokens up to the last local token; None: attention crosses documents."""
    by_source: Tensor | None = None
    """Sums of unmasked token losses of each source of a mixture, [n] fp64, filled on the last
    stage; `mask` is then 0 or 1 + source. A user-defined loss leaves them NaN."""
    scale: float = 1.0
    """Factor of the summed token losses: 1 / unmasked tokens of the global batch (0 if none)."""
    position_scale: float = 0.0
    """Factor of loss terms over all positions, such as the auxiliary loss: 1 / number of positions
    of the global batch, including masked ones. Like `scale`, it includes a loss scale."""
    first_row: int = 0
    """Index, within the whole micro-batch, of the first sample here. It is above 0 if an operation
    works on only some of the micro-batch's samples."""
    sample: int = 0
    """Index, within the global batch, of the first sample here."""
    start: int = 0
    """Index, among the local positions of the whole sequence, of the first token. It is above 0 if
    the tokens are a later sequence slice."""
    local_positions: LocalPositions | None = None
    """Positions of the local tokens, if context-parallel ranks split the sequence; None: all
    positions, in order."""
    positions: Tensor | None = None
    """[s, b]: position of each token, if samples begin with padding (in generation) or positions
    restart in each document; by default positions count from `start`."""
    sequence_length: int | None = None
    """Number of local positions of the whole sequence, if it is cut into slices."""

    scratch: Scratch = field(default_factory=Scratch, compare=False)
    """Values that layers store until the step ends."""
    sequence_scratch: Scratch | None = field(default=None, compare=False)
    """Values that layers share between all slices of a sequence; None: sequences are whole."""
    recompute_scratch: Scratch | None = field(default=None, compare=False)
    """Values that a first forward stores for its recomputation, freed with the autograd graph;
    None: nothing is stored."""

    def storing_for_recompute(self) -> MicroBatch:
        """Return a copy of this micro-batch with an empty `recompute_scratch`."""
        return replace(self, recompute_scratch=Scratch())

    def positions_of(self, rows: int) -> Positions:
        """Return the positions of hidden states [rows, b, h]."""
        if self.local_positions is None:
            return Positions.whole(rows, self.start)
        return self.local_positions.own.rows(self.start, self.start + rows)
