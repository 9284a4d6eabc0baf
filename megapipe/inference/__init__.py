"""Models used for inference: loaded, split over ranks, and run forward.

:mod:`~megapipe.inference.source` describes a checkpoint's model without its weights,
:mod:`~megapipe.inference.model` holds this process's stage of the model, and
:mod:`~megapipe.inference.job` starts and ends the commands, in one process or in several.
"""

from megapipe.inference.model import Model, load_model
from megapipe.inference.source import ModelInfo

__all__ = ["Model", "ModelInfo", "load_model"]
