"""Ranks as threads of one process, for code in which ranks only use a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def at_once(world: int, work: Callable[[int], Any]) -> list[Any]:
    """Return what `work(rank)` gives on each of `world` threads: a result or an exception."""
    results: list[Any] = [None] * world

    def rank_main(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results
