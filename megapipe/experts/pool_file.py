"""Pools of owners of a model in a file: JSON with a list of maps for each layer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megapipe.errors import ConfigError
from megapipe.experts.map import ExpertMap
from megapipe.words import count_noun, ranges

Pools = Mapping[int, Sequence[ExpertMap]]
"""By layer."""


def write_pools(path: Path, pools: Pools) -> None:
    """Write a file that :func:`read_pools` reads."""
    layers = {str(layer): [each.plain() for each in pool] for layer, pool in pools.items()}
    path.write_text(json.dumps({"layers": layers}) + "\n", encoding="utf-8")


def read_pools(path: Path, begin: Mapping[int, ExpertMap]) -> Pools:
    """The pools of these layers, whose maps are of as many experts and ranks as those of the
    beginning. Raises :class:`ConfigError`."""
    try:
        told = json.loads(path.read_bytes())["layers"]
        stored = {int(layer): list(pool) for layer, pool in told.items()}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{path}: expected a pool as experts.py plan -o writes it") from None
    if missing := begin.keys() - stored.keys():
        raise ConfigError(
            f"{path}: expected maps of layers {ranges(begin)}, there are none of {ranges(missing)}"
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
        raise ConfigError(f"{path}: layer {layer}: a map with copies: expected owners alone")
    return found
