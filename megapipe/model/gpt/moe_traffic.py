"""Exchanges about the choices of tokens, of ranks with parts of the same sequences. No torch.

It is told once for each micro-batch, in its first run, however often a layer is run.
"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.moe import routing_of
from megapipe.model.gpt.moe_memory import CHOICE, COUNT, high_bytes
from megapipe.model.gpt.parameters import known
from megapipe.model.interface import TokenTraffic


def routing_traffic(
    model: ModelConfig, layers: int, rows: int, length: int
) -> Iterator[TokenTraffic]:
    """Of so many layers with experts in a piece of `rows` whole sequences: counts for the balance
    term; with a capacity the choices themselves, and the weights if these decide who is dropped."""
    moe, routing = model.moe, routing_of(model.moe)
    scopes = rows if routing.per_sequence else 1
    yield TokenTraffic("all_reduce", layers, layers * scopes * known(moe.experts) * COUNT)
    if moe.capacity is None:
        return
    choices = layers * rows * length * moe.top_k
    yield TokenTraffic("all_gather", layers, choices * CHOICE)
    if moe.drop == "score":
        yield TokenTraffic("all_gather", layers, choices * high_bytes(model))
