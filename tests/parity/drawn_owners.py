"""Owners of experts that are drawn, and pools of them for a run to choose among."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megapipe.experts.map import ExpertMap
from megapipe.experts.pool_file import write_pools

DRAWN = 3
"""Maps of a pool, beside which a layer has those of the beginning."""


def drawn_map(present: ExpertMap, seed: int) -> ExpertMap:
    """Owners in any order, other than now; 0: as a run begins."""
    owners = list(ExpertMap.even(present.experts, present.ranks).owners)
    draw = random.Random(seed)
    while seed and (owners == list(present.owners) or owners == sorted(owners)):
        draw.shuffle(owners)
    return ExpertMap(tuple(owners), ((),) * present.ranks)


def pool_file(experts: Mapping[int, int], ranks: int) -> Path:
    """A file with a pool of each layer with so many experts, over so many ranks; the same for all
    processes, whoever writes it first."""
    key = hashlib.sha256(repr((sorted(experts.items()), ranks)).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"megapipe_pool_{key}.json")
    if not path.exists():
        begin = {layer: ExpertMap.even(number, ranks) for layer, number in experts.items()}
        own = path.with_suffix(f".{os.getpid()}")
        write_pools(
            own,
            {
                layer: [drawn_map(each, seed + layer) for seed in range(1, 1 + DRAWN)]
                for layer, each in begin.items()
            },
        )
        own.replace(path)
    return path
