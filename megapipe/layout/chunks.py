"""Chunks of tokens whose logits there are at a time."""

from megapipe.config import Config


def most_tokens(config: Config) -> int:
    """``kernels.loss_chunk`` on the device of a run; 0: the loss is not chunked."""
    return config.kernels.loss_tokens(cuda=config.parallel.device != "cpu")
