"""Callbacks do everything in a run besides training, one concern per file.

:mod:`~megapipe.train.callbacks.callback` has the hooks: when each is called, on which ranks, and
what it may do. User-defined callbacks have the same hooks. A callback that also derives from
:class:`~megapipe.checkpoint.stateful.Stateful` has a state that is saved in checkpoints.
"""

from typing import Any

from megapipe.checkpoint.stateful import Stateful
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.step_stats import RankRequests
from megapipe.util.old_members import renamed

__all__ = ["Callback", "RankRequests", "Run", "Stateful", "Step"]


def __getattr__(name: str) -> Any:
    return renamed(__name__, name, {"Wishes": "RankRequests"})
