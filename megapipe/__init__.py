"""megapipe: pretraining of GPT-style models with data, tensor and pipeline parallelism.

The library offers what ``docs/library.md`` describes: :class:`Pipeline`, :func:`train`,
:class:`TrainStep`, :func:`transformers_layers` and :func:`spawn`. Each name, and torch with it, is
loaded on first use.

To read the code, start at :mod:`megapipe.train.step.flushed` (one training step) or
:mod:`megapipe.schedule` (pipeline schedules as data). ``docs/design.md`` describes the whole.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megapipe.version import __version__ as __version__

if TYPE_CHECKING:
    from megapipe.launch.local import spawn
    from megapipe.library.pipeline import Pipeline
    from megapipe.library.transformers_layers import transformers_layers
    from megapipe.train.python_api import train
    from megapipe.train.train_step import TrainStep

__all__ = ["Pipeline", "TrainStep", "spawn", "train", "transformers_layers"]

_HOMES = {
    "Pipeline": "megapipe.library.pipeline",
    "TrainStep": "megapipe.train.train_step",
    "spawn": "megapipe.launch.local",
    "transformers_layers": "megapipe.library.transformers_layers",
}


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("megapipe.train")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
