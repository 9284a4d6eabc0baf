"""Callbacks do all that a run does besides training, each concern in a file of its own.

:mod:`~megapipe.train.callbacks.callback` has the hooks: when each is called, on which ranks, and
what it may do. A user's callbacks are called by the same hooks.
"""

from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.totals import Wishes

__all__ = ["Callback", "Run", "Step", "Wishes"]
