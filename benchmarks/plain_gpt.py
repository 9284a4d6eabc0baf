"""A GPT-2 as a careful programmer writes it for one device: the peer of :mod:`step`.

Batch first, one fused query-key-value layer, torch's attention kernel, tied embeddings, and one
cross-entropy over all logits. Parameters are named as in GPT-2's own checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from megapipe.config.model import ModelConfig


class _Attention(nn.Module):
    """[b, s, h] -> [b, s, h]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (
            part.view(b, s, self.heads, h // self.heads).transpose(1, 2)  # [b, heads, s, d]
            for part in self.c_attn(x).split(h, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.c_proj(y.transpose(1, 2).contiguous().view(b, s, h)))


class _MLP(nn.Module):
    """[b, s, h] -> [b, s, h]."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(hidden, inner)
        self.c_proj = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh")))


class _Block(nn.Module):
    """[b, s, h] -> [b, s, h]."""

    def __init__(self, hidden: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden, eps)
        self.attn = _Attention(hidden, heads)
        self.ln_2 = nn.LayerNorm(hidden, eps)
        self.mlp = _MLP(hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return cast(Tensor, x + self.mlp(self.ln_2(x)))


class PlainGPT(nn.Module):
    """tokens and labels [b, s] -> mean loss per token, nats."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.vocab_size is not None
        assert model.max_positions is not None
        assert model.ffn_hidden is not None
        h, inner = model.hidden, model.ffn_hidden
        self.wte = nn.Embedding(model.vocab_size, h)
        self.wpe = nn.Embedding(model.max_positions, h)
        self.h = nn.ModuleList(
            _Block(h, model.heads, inner, model.norm_eps) for _ in range(model.layers)
        )
        self.ln_f = nn.LayerNorm(h, model.norm_eps)
        self.lm_head = nn.Linear(h, model.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    def load_gpt2(self, state: Mapping[str, Tensor]) -> None:
        """Load the weights of a `GPT2LMHeadModel`, which keeps linear weights as [in, out]."""
        turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        self.load_state_dict(
            {
                name.removeprefix("transformer."): value.t() if name.endswith(turned) else value
                for name, value in state.items()
            }
        )
