"""Dispatchers, one file each: how tokens and experts get to the same rank."""

from __future__ import annotations

from typing import cast

from megapipe.config.experts import ExpertsConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import ConfigError
from megapipe.layers.moe.dispatch import Dispatcher
from megapipe.layers.moe.dispatchers.all_gather import AllGatherDispatcher
from megapipe.layers.moe.dispatchers.all_to_all import AllToAllDispatcher, HierarchicalDispatcher
from megapipe.layers.moe.dispatchers.fetch import FetchDispatcher
from megapipe.util.user_code import FAILURES, UserCode, is_user_code

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "Dispatcher",
    "FetchDispatcher",
    "HierarchicalDispatcher",
    "load_dispatcher",
    "make_dispatcher",
]

DISPATCHERS: dict[str, type[Dispatcher]] = {
    "all_to_all": AllToAllDispatcher,
    "hierarchical": HierarchicalDispatcher,
    "all_gather": AllGatherDispatcher,
    "fetch": FetchDispatcher,
}
"""Dispatchers by their names in ``experts.dispatch``."""


def make_dispatcher(config: ExpertsConfig, mesh: ParallelMesh) -> Dispatcher:
    """Make the dispatcher of a run. Raises :class:`ConfigError` if a user-defined dispatcher cannot
    be loaded."""
    if not is_user_code(config.dispatch):
        kind = DISPATCHERS[config.dispatch]
        return kind(**kind.settings(config, mesh))
    code = load_dispatcher(config.dispatch)
    kind = cast(type[Dispatcher], code.function)
    try:
        made = kind(**kind.settings(config, mesh))
    except FAILURES as error:
        raise code.failed(error) from error
    if not isinstance(getattr(made, "ep", None), Axis):
        raise code.problem(
            "its __init__ does not set ep: pass its arguments on to super().__init__"
        )
    return made


def load_dispatcher(name: str) -> UserCode:
    """Load the user-defined class that ``experts.dispatch`` names. Raises :class:`ConfigError`."""
    code = UserCode(name, what="experts.dispatch=", error=ConfigError, kind="class")
    found = code.function
    if not (isinstance(found, type) and issubclass(found, Dispatcher)):
        raise code.problem(
            "it is not a class derived from megapipe.layers.moe.dispatchers.Dispatcher"
        )
    for base in (HierarchicalDispatcher, FetchDispatcher):
        if issubclass(found, base):
            raise code.problem(
                f"it is derived from {base.__name__}: expected Dispatcher, AllToAllDispatcher or "
                "AllGatherDispatcher"
            )
    for method in sorted(found.__abstractmethods__):
        raise code.problem(f"it has no method {method}")
    return code
