"""Models and batches of the tests of the library."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH = 11, 8


class Split(nn.Module):
    """x -> (x, a tensor for later, whole numbers)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x.cumsum(1), torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])


class Join(nn.Module):
    """(x, earlier, positions) -> x."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, earlier: Tensor, positions: Tensor) -> Tensor:
        return x + torch.tanh(self.look(earlier / (1 + positions).unsqueeze(-1)))


class Through(nn.Module):
    """(x, earlier, positions) -> the same with another x."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return x * torch.sigmoid(self.up(x)), *others


def layers(dropout: float = 0.0) -> list[nn.Module]:
    """Make nine modules in fp64 with tuples in their middle, the same at every call."""
    torch.manual_seed(3)
    made = [
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)),
        nn.LayerNorm(WIDTH),
        Split(),
        Through(),
        Through(),
        Join(),
        nn.Dropout(dropout),
        nn.Linear(WIDTH, VOCABULARY),
    ]
    return [module.double() for module in made]


def batch(samples: int = 8, length: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens, labels and mask."""
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (samples, length), generator=draw)
    labels = torch.randint(VOCABULARY, (samples, length), generator=draw)
    return tokens, labels, torch.rand(samples, length, generator=draw) > 0.3


def run(modules: list[nn.Module], *inputs: Tensor) -> Tensor:
    """Run the modules one after the other, in plain torch."""
    x = inputs
    for module in modules:
        y = module(*x)
        x = y if isinstance(y, tuple) else (y,)
    return x[0]


def gradients(modules: list[nn.Module]) -> dict[str, Tensor]:
    """Return the gradients by name; zeros where none came."""
    named = nn.ModuleList(modules).named_parameters()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}
