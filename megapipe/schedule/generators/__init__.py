"""Generators of schedules, one file per family; importing this package registers them all."""

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
    "sequence",
    "v_family",
    "zb_heuristic",
    "zb_v",
    "zero_bubble",
]
