"""Groups of gloo processes for tests (:mod:`megapipe.launch.local`).

The processes come from Python's forkserver, which has torch loaded. So eight processes start in a
fraction of a second, and inherit nothing from earlier tests.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from megapipe.launch.local import RankError, World, run_ranks

PRELOAD = ("torch", "torch._dynamo", "megapipe.testing", "megapipe.train.trainer")
"""Modules that the forkserver preloads. torch._dynamo is needed to seed torch's generator."""
GROUP_TIMEOUT_S = 30.0

__all__ = ["World", "WorldError", "run_world"]


class WorldError(AssertionError):
    """One or more ranks of a test failed or did not end in time."""


def run_world(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Run `function(World, *args)` on `world` processes. Return the results by rank.

    `function` and `args` must be picklable (a function at module level). Raises :class:`WorldError`
    with the tracebacks of the ranks that failed; other ranks are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    try:
        return run_ranks(
            context, world, function, args, group_timeout_s=GROUP_TIMEOUT_S, timeout_s=timeout_s
        )
    except RankError as error:
        raise WorldError(str(error)) from None
