"""The dropout of a step as docs define it: random numbers are functions of coordinates.

A micro-batch's noise comes from torch's generator after the seed of (run seed, place, step, number
of the micro-batch, layer, tp rank if the tensor is split). It is drawn here for the whole batch at
once; only the seeds of coordinates come from the package.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megapipe.layers.rng import seed_of
from tests.parity.cases import Case, settings
from tests.parity.reference import COMPUTE_DTYPES, Noise
from tests.parity.routing_noise import routing_noise_of


def noise_of(case: Case, step: int) -> Noise | None:
    """Return the factors of dropout in a step of whole micro-batches, and the random numbers of
    routing; None: nothing is random."""
    of_routing = routing_noise_of(case, step)
    if not case.dropout:
        return of_routing or None
    layers = range(case.layers)
    places = [("embedding", 0), *((p, i) for p in ("attention_out", "mlp_out") for i in layers)]
    noise = {place: _batch(case, step, *place) for place in places}
    noise |= {("attention", i): _batch(case, step, "attention", i) for i in layers}
    return {**noise, **of_routing}


def _batch(case: Case, step: int, place: str, layer: int) -> Tensor:
    """Draw the noise of all samples: [b, s, h], for attention [b, heads, s, s]."""
    return torch.cat([_microbatch(case, step, i, place, layer) for i in range(case.dp * case.m)])


def _microbatch(case: Case, step: int, index: int, place: str, layer: int) -> Tensor:
    """Join the draws of the tp ranks: parts of the heads, or of the sequence."""
    config = settings(case)
    split = place == "attention" or case.sequence_parallel
    parts = []
    for tp in range(case.tp if split else 1):
        torch.manual_seed(seed_of(config.run.seed, place, step, index, layer, tp))
        if place == "attention":
            assert config.model.heads is not None
            parts.append(_of_heads(case, config.model.heads // case.tp))
        else:
            length = case.sequence // (case.tp if split else 1)
            parts.append(_of_rows(case, length, config.model.hidden))
    return torch.cat(parts, dim=1)


def _of_rows(case: Case, length: int, hidden: int) -> Tensor:
    """Return [b, length, h], drawn as [length, b, h]."""
    ones = torch.ones(length, case.batch, hidden, dtype=COMPUTE_DTYPES[case.dtype])
    return F.dropout(ones, case.dropout).transpose(0, 1).double()


def _of_heads(case: Case, heads: int) -> Tensor:
    """Return [b, heads, s, s], read from torch's attention: uniform over what is seen, values
    one-hot."""
    s, dtype = case.sequence, COMPUTE_DTYPES[case.dtype]
    q = torch.zeros(case.batch, heads, s, s, dtype=dtype)
    v = torch.eye(s, dtype=dtype).expand(case.batch, heads, s, s)
    out = F.scaled_dot_product_attention(q, q, v, is_causal=True, dropout_p=case.dropout)
    return (out != 0).double() / (1 - case.dropout)
