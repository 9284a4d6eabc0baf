"""Files with the expert pools of a model: JSON with a list of owner maps for each layer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megapipe.errors import ConfigError
from megapipe.experts.map import ExpertMap
from megapipe.text import count_noun, ranges

Pools = Mapping[int, Sequence[ExpertMap]]
"""Owner maps in the pool of each layer, by layer number."""


def write_pools(path: Path, pools: Pools) -> None:
    """Write the pools to a file that :func:`read_pools` reads."""
    layers = {str(layer): [each.plain() for each in pool] for layer, pool in pools.items()}
    path.write_text(json.dumps({"layers": layers}) + "\n", encoding="utf-8")


def read_pools(path: Path, begin: Mapping[int, ExpertMap]) -> Pools:
    """Read the pool of each MoE layer. `begin`: initial map of each MoE layer. A map of a pool must
    have as many experts and ranks as the layer's initial map, and no replicas. Raises
    :class:`ConfigError`."""
    try:
        pools = json.loads(path.read_bytes())["layers"]
        stored = {int(layer): list(pool) for layer, pool in pools.items()}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{path}: expected a pool as experts.py rebalance -o writes it") from None
    if missing := begin.keys() - stored.keys():
        raise ConfigError(
            f"{path}: maps are missing for layers {ranges(missing)}: expected one list per "
            f"layer {ranges(begin)}"
        )
    return {
        layer: [_map(path, layer, each, begin[layer]) for each in stored[layer]] for layer in begin
    }


def _map(path: Path, layer: int, value: object, begin: ExpertMap) -> ExpertMap:
    try:
        found = ExpertMap.stored(value)
    except ConfigError as error:
        raise ConfigError(f"{path}: layer {layer}: {error}") from None
    if (found.experts, found.ranks) != (begin.experts, begin.ranks):
        raise ConfigError(
            f"{path}: layer {layer}: a map of {count_noun(found.experts, 'expert')} over "
            f"{count_noun(found.ranks, 'rank')}: expected {begin.experts} over {begin.ranks}"
        )
    if any(found.replicas):
        raise ConfigError(f"{path}: layer {layer}: a map with replicas: expected only owners")
    return found
