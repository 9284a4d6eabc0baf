"""Callbacks do all that a run does besides training, each concern in a file of its own.

:mod:`~megapipe.train.callbacks.callback` has the hooks: when each is called, on which ranks, and
what it may do. A user's callbacks are called by the same hooks. One that derives from
:class:`~megapipe.checkpoint.stateful.Stateful` too has a state that checkpoints keep.
"""

from megapipe.checkpoint.stateful import Stateful
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.totals import Wishes

__all__ = ["Callback", "Run", "Stateful", "Step", "Wishes"]
