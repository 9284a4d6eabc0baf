"""Chunks of tokens whose logits there are at a time."""


def loss_chunk(tokens: int, most: int) -> int:
    """Length of the chunks in which the loss of `tokens` is computed, `most` being
    ``kernels.loss_chunk``: at most half of them, so that their logits are never there in full."""
    return min(most, -(-tokens // 2))
