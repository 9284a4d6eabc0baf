"""Plain torch modules that the methods are applied to. They know nothing of devices."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Two linear layers with GELU: [..., h] -> [..., h]."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, wide)
        self.down = nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Causal attention with separate projections: [b, s, h] -> [b, s, h]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [b, heads, s, d]
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A GPT block: attention and MLP, each after a norm, each added to the residual."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A small GPT: token ids [b, s] -> logits [b, s, vocabulary]."""

    def __init__(self, vocabulary: int, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
