"""The split backward against autograd's: ``python benchmarks/split_backward.py``.

A stage computes input gradients (``I``) and weight gradients (``W``) apart, so that a schedule can
move W into a bubble. The split should cost nothing: I + W of a stage take as long as the backward
of the same transformer made of ``torch.nn`` layers. Both sides have the same weights and input,
their gradients are compared first, and gradients accumulate on both. In bf16 megapipe accumulates
them in fp32, torch in bf16. With recomputation both save only the input and recompute the forward
within what is timed; torch by ``torch.utils.checkpoint``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from common import Result, compare, parser, report, seconds
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megapipe.config.model import ModelConfig
from megapipe.distributed.mesh import Axis
from megapipe.engine.stage import Stage
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import TORCH_DTYPES, Sharding, spec_of
from megapipe.layers.weight_grad import main_grad
from megapipe.model.gpt.stage import GPTStage
from megapipe.model.partition import StageSpec
from megapipe.optim.buffers import Bucket, owned_parameters
from megapipe.util.dtypes import Dtype

TARGET = 1.05
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
"""Largest difference of a gradient, relative to the largest value of its tensor."""


@dataclass(frozen=True)
class Size:
    """Shape of the stage and of its input [s, b, h]."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    dtype: Dtype
    device: str
    recompute: bool = False

    def model(self) -> ModelConfig:
        config = ModelConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            vocab_size=2,
            dtype=self.dtype,
        )
        return config.resolved(vocab_size=2, sequence_length=self.sequence)


class PlainBlock(nn.Module):
    """The layer of :class:`megapipe.model.gpt.block.Block`, made of torch's own modules."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        s, b, h = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(s, b, self.heads, 3, h // self.heads)
        q, k, v = (part.permute(1, 2, 0, 3) for part in qkv.unbind(3))  # [b, heads, s, d]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.permute(2, 0, 1, 3).reshape(s, b, h))
        y = functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self.down(y)


class Sides:
    """The stage and its plain twin."""

    def __init__(self, size: Size) -> None:
        self.device = torch.device(size.device)
        dtype = TORCH_DTYPES[size.dtype]
        spec = StageSpec(embedding=False, layers=range(size.layers), head=False)
        module = GPTStage(size.model(), spec, Sharding(Axis.alone(), False, dtype))
        Bucket(0, list(owned_parameters(module)), Axis.alone(), self.device)
        self.stage = Stage(module, recompute=size.recompute)
        self.recompute = size.recompute
        self.stage.route_autograd_grads()
        blocks = [PlainBlock(size.hidden, size.heads) for _ in range(size.layers)]
        self.plain = nn.Sequential(*blocks).to(self.device, dtype)
        for ours, theirs in self.pairs():
            ours.data.copy_(theirs)
            theirs.grad = torch.zeros_like(theirs)
        generator = torch.Generator().manual_seed(0)
        shape = (size.sequence, size.batch, size.hidden)
        x, grad = (torch.randn(shape, generator=generator) for _ in range(2))
        self.x = x.to(self.device, dtype).requires_grad_()
        self.grad = grad.to(self.device, dtype)
        self.mb = MicroBatch(index=0, step=0, seed=0)

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return each parameter of the stage with its twin."""
        plain = dict(self.plain.named_parameters())
        result = []
        for parameter in self.stage.module.parameters():
            name = spec_of(parameter).name.removeprefix("layers.")
            for part in ("attention.", "mlp."):
                name = name.replace(f".{part}", ".")
            result.append((parameter, plain[name]))
        return result

    def split(self) -> float:
        """Return the seconds of I and W."""
        self.stage.forward((0, 0), self.x, self.mb)

        def backward() -> None:
            self.stage.input_grad((0, 0), self.grad)
            self.stage.weight_grad((0, 0))

        return seconds(backward, self.device)

    def autograd(self) -> float:
        """Return the seconds of the plain backward."""
        y = (
            checkpoint(self.plain, self.x, use_reentrant=False)
            if self.recompute
            else self.plain(self.x)
        )
        self.x.grad = None
        return seconds(lambda: torch.autograd.backward([y], [self.grad]), self.device)

    def check(self, tolerance: float) -> None:
        """Check that both sides give the same gradients."""
        self.stage.forward((0, 0), self.x, self.mb)
        ours = self.stage.input_grad((0, 0), self.grad)
        self.stage.weight_grad((0, 0))
        self.autograd()
        grads = [(main_grad(a), b.grad) for a, b in self.pairs()]
        for mine, other in [(ours, self.x.grad), *grads]:
            assert mine is not None
            assert other is not None
            difference = (mine - other).abs().max() / other.abs().max()
            assert difference < tolerance, f"gradients differ by {difference:.3g}"


def measure(size: Size, *, rounds: int, layers_per_round: int) -> Result:
    sides = Sides(size)
    sides.check(TOLERANCE[size.dtype])
    repeats = max(1, layers_per_round // size.layers)
    times = compare(
        lambda: sum(sides.split() for _ in range(repeats)),
        lambda: sum(sides.autograd() for _ in range(repeats)),
        rounds=rounds,
    )
    plural = "s" if size.layers > 1 else ""
    return Result(
        claim=f"{'R + ' if size.recompute else ''}I + W of {size.layers} layer{plural}, "
        f"{size.dtype} on {size.device}",
        value=times.ratio,
        target=TARGET,
        unit="x",
        peer="torch autograd",
    )


def sizes(*, quick: bool) -> list[Size]:
    if quick:
        chosen = [Size(n, 16, 2, 8, 2, "fp32", "cpu") for n in (1, 4, 16)]
    else:
        chosen = [Size(n, 256, 4, 128, 2, "fp32", "cpu") for n in (1, 4, 16)]
        if torch.cuda.is_available():
            chosen += [Size(n, 2048, 16, 2048, 1, "bf16", "cuda") for n in (1, 4, 16)]
    return chosen + [replace(size, recompute=True) for size in chosen]


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=15, help="timed rounds per size (15)")
    given = options.parse_args(argv)
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    torch.set_num_threads(1)
    rounds, layers = (1, 1) if given.quick else (given.rounds, 16)
    results = [
        measure(size, rounds=rounds, layers_per_round=layers) for size in sizes(quick=given.quick)
    ]
    report("Split backward", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
