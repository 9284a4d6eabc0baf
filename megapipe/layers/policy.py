"""Choices of the layers that the plan reads too: activations kept, chunks of the loss, padding.

Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LEAST = 128
"""Tokens whose logits are small enough to be there at once: halves would save little memory, and
each has products and, over tp, an exchange of its own."""


VOCAB_MULTIPLE = 128
"""A tp rank's share of the vocabulary is padded to a multiple of this: GEMMs work in tiles of it,
and rows of logits then begin at multiples of a cache line."""


@dataclass(frozen=True)
class BlockPolicy:
    """How a block keeps its activations; by default autograd does.

    The names are those of modules, `norm`, `attention` and `mlp_activation`, or `block`, which
    stands for whole blocks.
    """

    recompute: frozenset[str] = frozenset()
    """Modules that are run again in the backward, from their input."""
    offload: frozenset[str] = frozenset()
    """Modules whose activations, the input among them, wait in host memory."""

    @property
    def offloads_input(self) -> bool:
        """Whether the block's input waits in host memory."""
        return bool(self.offload & {"norm", "block"})


class Span(NamedTuple):
    """Consecutive blocks with one policy; if they are run again, they are so together."""

    blocks: int
    policy: BlockPolicy


def padded_vocabulary(vocab_size: int, tp: int) -> int:
    """The vocabulary padded so that every tp rank gets the same multiple of VOCAB_MULTIPLE."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


def loss_chunk(tokens: int, most: int) -> int:
    """Length of the chunks in which the loss of `tokens` is computed, `most` being
    ``kernels.loss_chunk``: at most half of them, so that their logits are never there in full, but
    for few tokens."""
    return min(most, tokens, max(LEAST, -(-tokens // 2)))
