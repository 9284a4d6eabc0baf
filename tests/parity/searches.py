"""Searches for layouts (megapipe plan) from words of a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megapipe.cli import configured
from megapipe.plan.cache import Cache
from megapipe.plan.search.search import Search, split_words


def search_of(
    words: Sequence[str], fixed: Mapping[str, str], gpus: int, cache: Cache | None = None
) -> Search:
    """Prepare the search for a layout of `gpus` devices that has the `fixed` values of keys."""
    kept, free = split_words([*words, *(f"{key}={value}" for key, value in fixed.items())])
    return Search(configured(kept), free, gpus, cache)
