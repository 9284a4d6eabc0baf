"""Training: one step (:mod:`megapipe.train.step.flushed`) and the run around it.

The package can be called: ``megapipe.train(config, ...)`` is :func:`megapipe.train.objects.train`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from megapipe.train.objects import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
