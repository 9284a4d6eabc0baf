"""Which attention of a GPT is written out, whose positions are not split, and what that takes."""

from __future__ import annotations

from megapipe.dtypes import DTYPE_BYTES
from megapipe.model.explicit import Explicit
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.saved import Widths
from megapipe.model.gpt.scores import scores_of
from megapipe.model.interface import Sizes


def explicit_of(model: ModelConfig, sizes: Sizes) -> Explicit:
    """That of one block, of the layers that have a window if some have; nothing where a kernel of
    torch computes it, or blocks of split positions, which are planned with their exchanges."""
    scores = scores_of(model, 0, 0, sizes.tp)._replace(window=model.window)
    scores = scores.among(sizes.attended)
    if sizes.cuda or sizes.cp > 1 or scores.plain:
        return Explicit()
    w = Widths.of(model, sizes)
    return Explicit.of(
        scores,
        rows=sizes.rows,
        queries=sizes.sequence,
        keys=sizes.attended,
        per_group=w.heads // w.groups,
        head_dim=w.queries // w.heads,
        size=DTYPE_BYTES[model.dtype],
    )
