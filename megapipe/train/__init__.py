"""Training: a single step (:mod:`megapipe.train.step.flushed`) and the whole run.

The package is callable: ``megapipe.train(config, ...)`` is :func:`megapipe.train.python_api.train`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from megapipe.train.python_api import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
