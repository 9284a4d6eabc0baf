"""Check, before a run, that this version of torch compiles a model's blocks correctly."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd import backward

from megapipe.config.model import ModelConfig
from megapipe.context.positions import Positions
from megapipe.context.split import LocalPositions
from megapipe.errors import ConfigError
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import Sharding, spec_of
from megapipe.layers.weight_grad import WeightGradQueue
from megapipe.model.gpt.block import Block, Rotary
from megapipe.model.gpt.compiled import CompiledBlock
from megapipe.model.gpt.moe.moe_layer import MoELayer
from megapipe.model.gpt.rotary import Rotaries, rotaries
from megapipe.ops.documents import Documents

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 0.2,
    torch.bfloat16: 0.2,
}
"""Maximum relative error, norm of the difference / norm of the result, by number type. A tensor
that the compiled graph overwrote has an error of about 1."""


def check_compiled(
    config: ModelConfig,
    sharding: Sharding,
    *,
    length: int,
    rows: Collection[int],
    recompute: bool,
    documents: bool,
    device: torch.device,
    local_positions: LocalPositions | None = None,
) -> None:
    """Compare a compiled block of random weights with the same block uncompiled.

    `rows`: the micro-batch sizes to check, in sequences of `length` tokens. For each size, two
    micro-batches are in flight at once. The check compares outputs (with and without gradients),
    input gradients, gradients of norms, and all tensors queued for weight gradients. With
    `recompute` it also compares a recomputed forward (`skip_output`). `documents`: whether
    attention gets a document mask. `local_positions`: this rank's positions, if cp splits
    sequences. Collective over tp or cp. Raises :class:`ConfigError` for a difference.

    The check also compiles every graph of training and validation before the first step. A rank
    that compiled within a step would wait for its device, and the device for a receive from another
    rank.
    """
    assert sharding.kernels.compiler is not None
    own = replace(sharding, queue=WeightGradQueue())
    compiled = CompiledBlock(sharding.kernels.compiler)
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(sharding.dtype)

    def new_block(layer: int) -> Block:
        block = Block(own, config, layer, compiled)
        if block.mixture is not None:
            block.mixture = _Through()
        specs = [spec_of(parameter) for parameter in block.parameters()]
        block.to_empty(device=device)
        with torch.no_grad():
            for parameter, spec in zip(block.parameters(), specs, strict=True):
                drawn = draw(parameter.shape)
                parameter.copy_(spec.fill + drawn / 10 if spec.std is None else drawn * spec.std)
        return block

    here = Positions.whole(length) if local_positions is None else local_positions.own
    split = sharding.tp.size if sharding.sequence_split else 1
    tables = Rotaries(None)
    if config.positions == "rotary":
        tables = rotaries(config, here, device, sharding.dtype)
    kinds = {
        (config.window_of(layer), config.moe.has_experts(layer)): layer
        for layer in range(config.layers)
    }
    for block, number in itertools.product(map(new_block, kinds.values()), sorted(rows)):
        rotary = block.tables(tables)
        shape = (here.count // split, number, config.hidden)
        data = [(draw(shape), draw(shape)) for _ in range(2)]
        ids = (torch.arange(length) * 3 // length).expand(number, length)
        ends = Documents(ids, device) if documents else None
        mb = MicroBatch(0, 0, 0, documents=ends, local_positions=local_positions)
        for skip_output in (False, True) if recompute else (False,):
            block.compiled = compiled
            try:
                found = _results(block, data, mb, rotary, skip_output=skip_output)
            except Exception as error:  # a missing or failing compiler raises many kinds of errors
                raise ConfigError(
                    f"kernels.compile=true: torch.compile fails: {_reason(error)}; expected false"
                ) from error
            block.compiled = None
            _compare(found, _results(block, data, mb, rotary, skip_output=skip_output))


class _Through(MoELayer):
    """Identity in place of an MoE layer: it is not compiled, and rounding could change routing."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Tensor, mb: MicroBatch, skip_output: bool = False) -> Tensor:
        return x


def _compare(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, wanted in right.items():
        off, limit = _norm(found[name] - wanted) / _norm(wanted), TOLERANCE[wanted.dtype]
        if not off <= limit:
            raise ConfigError(
                f"kernels.compile=true: the {name} of a compiled block is {off:.1e} off, at "
                f"most {limit:.0e}: torch {torch.__version__} compiles it wrongly: expected "
                "kernels.compile=false"
            )


def _results(
    block: Block,
    data: list[tuple[Tensor, Tensor]],
    mb: MicroBatch,
    rotary: Rotary,
    *,
    skip_output: bool,
) -> dict[str, Tensor]:
    """Run two micro-batches, the first backward after the second forward; return the results."""
    queue = block.sharding.queue
    layers = ("out", "qkv") if block.mixture is not None else ("down", "up", "out", "qkv")
    found: dict[str, Tensor] = {}
    if not skip_output:
        with torch.no_grad():
            found["output without a graph"] = block(data[0][0], mb, rotary)
    xs = [x.clone().requires_grad_() for x, _ in data]
    ys = [block(x, mb, rotary, None, skip_output) for x in xs]
    for i, (y, (_, grad)) in enumerate(zip(ys, data, strict=True)):
        queue.open(i)
        backward(y, grad)
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        assert x.grad is not None
        if not skip_output:
            found[f"output {i}"] = y.detach()
        found[f"input gradient {i}"] = x.grad
        for task, layer in zip(queue.pending()[i], layers, strict=True):
            for what, tensor in zip(("input", "gradient"), task.tensors(), strict=True):
                found[f"{what} {i} of {layer}"] = tensor
    for name, parameter in block.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
    queue.clear()
    block.zero_grad()
    return found


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x, dtype=torch.float64).item()


def _reason(error: BaseException) -> str:
    """Return the original cause of a compiler error in one line, without torch's headings."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip() and not line.endswith(":")]
    return lines[0].strip() if lines else type(error).__name__
