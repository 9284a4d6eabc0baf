"""Chunks of tokens for the loss."""

import pytest

from megapipe.layers.activation_policy import LEAST, loss_chunk


@pytest.mark.parametrize(
    ("tokens", "most", "chunk"),
    [
        (1, 256, 1),
        (LEAST, 256, LEAST),
        (LEAST + 1, 256, LEAST),
        (2 * LEAST, 256, LEAST),
        (2 * LEAST + 1, 256, LEAST + 1),
        (4096, 256, 256),
        (400, 256, 200),
        (64, 5, 5),
    ],
)
def test_length_of_a_chunk(tokens: int, most: int, chunk: int) -> None:
    """All of a few tokens, then half of them, and never more than what is asked for."""
    assert loss_chunk(tokens, most) == chunk
