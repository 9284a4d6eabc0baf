"""Worlds of gloo processes for tests (:mod:`megapipe.launch.local`).

Processes come from a forkserver that has torch loaded, so a world of 8 starts in a fraction of a
second, without anything that a test before has done.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from megapipe.launch.local import RankError, World, run_ranks

PRELOAD = ("torch", "torch._dynamo", "megapipe.testing", "megapipe.train.trainer")
"""Modules that the forkserver has loaded; seeding torch's generator needs torch._dynamo."""
GROUP_TIMEOUT_S = 30.0

__all__ = ["World", "WorldError", "run_world"]


class WorldError(AssertionError):
    """One or more ranks of a test world failed or did not end in time."""


def run_world(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Run `function(World, *args)` on `world` processes; returns their results by rank.

    `function` and `args` must be picklable (a function at module level). Raises
    :class:`WorldError` with the tracebacks of the ranks that failed; the others are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    try:
        return run_ranks(
            context, world, function, args, group_timeout_s=GROUP_TIMEOUT_S, timeout_s=timeout_s
        )
    except RankError as error:
        raise WorldError(str(error)) from None
