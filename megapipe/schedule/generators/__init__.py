"""Generators of schedules, one file per family; importing this package registers them all.

Docstrings of generators use these symbols: p ranks, m micro-batches, v chunks per rank, rank r. F,
B, I and W stand for kinds of operations (:class:`~megapipe.schedule.ir.Kind`) and for their times.
A peak is the maximum number of micro-batches whose activations a rank has at once. A *chunk
activation* is the activation of one micro-batch in one chunk.
"""

from megapipe.schedule.generators import (
    autopipe,
    bitpipe,
    breadth_first,
    chimera,
    dualpipe,
    gems,
    gpipe,
    grouped_interleaved,
    hanayo,
    interleaved,
    naive,
    one_f_one_b,
    recompute,
    replicated,
    sequence,
    v_family,
    zb_heuristic,
    zb_v,
    zero_bubble,
)
from megapipe.schedule.generators.forward import forward_only
from megapipe.schedule.generators.gpipe import gpipe_on
from megapipe.schedule.generators.registry import accepts, aliases, build, names, register

__all__ = [
    "accepts",
    "aliases",
    "autopipe",
    "bitpipe",
    "breadth_first",
    "build",
    "chimera",
    "dualpipe",
    "forward_only",
    "gems",
    "gpipe",
    "gpipe_on",
    "grouped_interleaved",
    "hanayo",
    "interleaved",
    "naive",
    "names",
    "one_f_one_b",
    "recompute",
    "register",
    "replicated",
    "sequence",
    "v_family",
    "zb_heuristic",
    "zb_v",
    "zero_bubble",
]
