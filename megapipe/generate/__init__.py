"""Text generation from a checkpoint that was saved with any layout.

:class:`Generator` holds the model. :mod:`~megapipe.generate.cached_decoder` caches keys and values
of tokens that were read, :mod:`~megapipe.generate.sampling` samples tokens, and
:mod:`~megapipe.generate.text` turns tokens into characters.
"""

from typing import Any

from megapipe.checkpoint.find import find_checkpoint
from megapipe.generate.generator import Generator, TokenOutput
from megapipe.generate.sampling import Sampling
from megapipe.util.old_members import renamed

__all__ = ["Generator", "Sampling", "TokenOutput", "find_checkpoint"]


def __getattr__(name: str) -> Any:
    return renamed(__name__, name, {"Piece": "TokenOutput"})
