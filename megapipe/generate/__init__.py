"""Text from a checkpoint, in one process, whatever layout saved it.

:class:`Generator` holds the model; :mod:`~megapipe.generate.reading` keeps keys and values of what
it has read, :mod:`~megapipe.generate.sampling` chooses the tokens, and
:mod:`~megapipe.generate.text` makes characters of them.
"""

from megapipe.checkpoint.find import find_checkpoint
from megapipe.generate.generator import Generator, Piece
from megapipe.generate.sampling import Sampling

__all__ = ["Generator", "Piece", "Sampling", "find_checkpoint"]
