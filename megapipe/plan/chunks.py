"""Chunks of tokens whose logits there are at a time."""

from megapipe.config import Config

LEAST = 128
"""Tokens whose logits are small enough to be there at once: halves would save little memory, and
each has products and, over tp, an exchange of its own."""


def most_tokens(config: Config) -> int:
    """``kernels.loss_chunk`` on the device of a run; 0: the loss is not chunked."""
    return config.kernels.loss_tokens(cuda=config.parallel.device != "cpu")


def loss_chunk(tokens: int, most: int) -> int:
    """Length of the chunks in which the loss of `tokens` is computed, `most` being that of
    :func:`most_tokens`: at most half of them, so that their logits are never there in full, but
    for few tokens."""
    return min(most, tokens, max(LEAST, -(-tokens // 2)))
