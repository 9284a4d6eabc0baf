"""Drawn owners of experts, and pools of them from which a run chooses."""

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
"""Drawn maps per pool; a layer has its initial map in addition."""


def drawn_map(present: ExpertMap, seed: int) -> ExpertMap:
    """Draw owners in any order, other than now; 0: the initial ones."""
    owners = list(ExpertMap.even(present.experts, present.ranks).owners)
    draw = random.Random(seed)
    while seed and (owners == list(present.owners) or owners == sorted(owners)):
        draw.shuffle(owners)
    return ExpertMap(tuple(owners), ((),) * present.ranks)


def pool_file(experts: Mapping[int, int], ranks: int) -> Path:
    """Write a pool for each layer, with its number of experts, over `ranks` ranks, and return the
    file. All processes share it; the first one writes it."""
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
