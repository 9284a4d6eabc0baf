"""Recomputation, offloading, loss chunks, vocabulary padding: settings that the plan reads too.

Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LEAST = 128
"""Minimum number of tokens in a loss chunk: smaller ones would save little memory, and each loss
chunk has GEMMs and, over tp, an all-gather of its own."""


VOCAB_MULTIPLE = 128
"""Multiple to which a tp rank's shard of the vocabulary is padded: GEMMs work in tiles of 128, and
each row of logits then begins at a multiple of a cache line."""


@dataclass(frozen=True)
class BlockPolicy:
    """Activations of a block that are recomputed or offloaded; by default all are saved.

    `recompute` and `offload` contain `norm`, `attention`, `mlp_activation` or `experts`, or `block`
    for the whole block.
    """

    recompute: frozenset[str] = frozenset()
    """Modules that the backward recomputes from their input."""
    offload: frozenset[str] = frozenset()
    """Modules whose activations, including the input, are offloaded to host memory."""
    saves_attention: bool = False
    """Whether attention's output and LSE are saved even if the module around it is recomputed."""

    @property
    def offloads_input(self) -> bool:
        """Whether the block's input is offloaded to host memory."""
        return bool(self.offload & {"norm", "block"})


class BlockSpan(NamedTuple):
    """A number of consecutive transformer blocks with one policy. If the policy recomputes `block`,
    they are recomputed together."""

    blocks: int
    policy: BlockPolicy


def padded_vocabulary(vocab_size: int, tp: int) -> int:
    """Return the vocabulary size, padded to a multiple of tp * VOCAB_MULTIPLE."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


def loss_chunk(tokens: int, most: int) -> int:
    """Return the length of the loss chunks for `tokens` tokens.

    The length is at most `most` (``kernels.loss_chunk_tokens``). It is also at most half of
    `tokens`, so that not all logits exist at once, unless half is less than :data:`LEAST`.
    """
    return min(most, tokens, max(LEAST, -(-tokens // 2)))
