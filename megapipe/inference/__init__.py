"""Models that are used and not trained: found, spread over ranks, run forward.

:mod:`~megapipe.inference.source` says what a checkpoint's model is beside its weights,
:mod:`~megapipe.inference.model` holds this process' stage of it, and
:mod:`~megapipe.inference.job` is what the commands of several processes share.
"""

from megapipe.inference.model import Model, load_model
from megapipe.inference.source import ModelInfo

__all__ = ["Model", "ModelInfo", "load_model"]
