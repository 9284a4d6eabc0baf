"""Choices of the layers that the plan reads too: activations kept, chunks of the loss, padding.

Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LEAST = 128
"""The loss of up to so many tokens is not cut in half: chunks below that would save little memory,
and each costs GEMMs and, over tp, an all-gather of its own."""


VOCAB_MULTIPLE = 128
"""A tp rank's share of the vocabulary is padded to a multiple of this: GEMMs work in tiles of it,
and rows of logits then begin at multiples of a cache line."""


@dataclass(frozen=True)
class BlockPolicy:
    """Which activations of a block are recomputed or offloaded; by default all are kept.

    Modules are named `norm`, `attention`, `mlp_activation` and `experts`; `block` stands for whole
    blocks.
    """

    recompute: frozenset[str] = frozenset()
    """Modules that are run again in the backward, from their input."""
    offload: frozenset[str] = frozenset()
    """Modules whose activations, the input among them, wait in host memory."""
    keeps_attention: bool = False
    """Whether results of attention are kept where what holds it is run again."""

    @property
    def offloads_input(self) -> bool:
        """Whether the block's input waits in host memory."""
        return bool(self.offload & {"norm", "block"})


class BlockSpan(NamedTuple):
    """Consecutive blocks with one policy; where it recomputes whole blocks, they rerun together."""

    blocks: int
    policy: BlockPolicy


def padded_vocabulary(vocab_size: int, tp: int) -> int:
    """The vocabulary padded so that every tp rank gets the same multiple of VOCAB_MULTIPLE."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


def loss_chunk(tokens: int, most: int) -> int:
    """Length of the chunks in which the loss of `tokens` is computed.

    It is at most `most` (``kernels.loss_chunk``), and at most half of `tokens` unless they are few,
    so that not all logits exist at once.
    """
    return min(most, tokens, max(LEAST, -(-tokens // 2)))
