"""The report on what runs in an order: pipelines, actors, module schedules and primitives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.sharding import primitives
from examples.sharding.actors import Actor, Runtime
from examples.sharding.models import GPT, MLP
from examples.sharding.module_schedule import ModuleSchedule, build, shard_block, step, whole_grads
from examples.sharding.propagation import shifted_pipeline
from examples.sharding.report import Sizes
from examples.sharding.threads import Devices
from megapipe.schedule.generators import build as generate

STAGES = 2
MICROBATCHES = 4
VOCABULARY = 16


def runs(sizes: Sizes) -> Iterator[str]:
    """Yield the lines of the report."""
    generator = torch.Generator().manual_seed(0)
    yield f"\nOrders of {STAGES} stages and {MICROBATCHES} micro-batches"
    yield f"  GSPMD, stages shifted: error {_shifted(sizes, generator):.0e}"
    for registers in (1, 2):
        done = Runtime(_actors(registers)).run(MICROBATCHES)
        yield (
            f"  OneFlow, {registers} registers per actor: {done.seconds:.0f} seconds, "
            f"at most {max(done.registers.values())} in use"
        )
    for name, graph in (
        ("1f1b", primitives.one_f_one_b(STAGES, MICROBATCHES)),
        ("gpipe", primitives.gpipe(STAGES, MICROBATCHES)),
    ):
        wanted = generate(name, ranks=STAGES, microbatches=MICROBATCHES)
        equal = primitives.as_schedule(graph, name).ops == wanted.ops
        yield f"  nnScaler, {name}: tables {'equal' if equal else 'differ from'} the generator's"
    yield f"  nnScaler, co-shard of an MLP: error {_co_shard(sizes, generator):.0e}"
    yield f"  Slapo, GPT of {STAGES} blocks: error {_module_schedule(sizes, generator):.0e}"


def _shifted(sizes: Sizes, generator: torch.Generator) -> float:
    h, shape = sizes.hidden, (MICROBATCHES, sizes.batch * sizes.sequence, sizes.hidden)
    weights = torch.randn(STAGES, h, h, generator=generator, dtype=torch.float64) / h
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    made = shifted_pipeline(lambda state, own: torch.tanh(torch.bmm(state, own)), weights, x)
    wanted = x
    for weight in weights:
        wanted = torch.tanh(wanted @ weight)
    return float((made - wanted).abs().max())


def _actors(registers: int) -> list[Actor]:
    source = Actor("data", float, registers=registers)
    names = ["data", *(f"stage {index}" for index in range(STAGES))]
    stages = [
        Actor(name, lambda x: x + 1, inputs=(before,), registers=registers)
        for before, name in pairwise(names)
    ]
    return [source, *stages]


def _co_shard(sizes: Sizes, generator: torch.Generator) -> float:
    mlp = MLP(sizes.hidden, 4 * sizes.hidden).double()
    x = torch.randn(sizes.shape, generator=generator, dtype=torch.float64)
    sides = []
    for run in (mlp, primitives.co_shard(mlp, 4)):
        y = run(x)
        sides.append([y, *torch.autograd.grad(y.square().sum(), list(mlp.parameters()))])
    return max(float((a - b).detach().abs().max()) for a, b in zip(*sides, strict=True))


def _module_schedule(sizes: Sizes, generator: torch.Generator) -> float:
    model = GPT(VOCABULARY, sizes.hidden, sizes.heads, STAGES).double()
    shape = sizes.batch, sizes.sequence
    tokens, labels = (torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
    schedule = ModuleSchedule(model, devices=2)
    for index in range(STAGES):
        shard_block(schedule, f"blocks.{index}")
        schedule.checkpoint(f"blocks.{index}.mlp")
    schedule.pipeline_split("blocks.0")
    devices, parts = Devices(2), labels.chunk(MICROBATCHES)
    order = generate("1f1b", ranks=STAGES, microbatches=MICROBATCHES)

    def loss(y: Tensor, microbatch: int) -> Tensor:
        return F.cross_entropy(y.flatten(0, 1), parts[microbatch].flatten(), reduction="sum")

    replicas = [build(schedule, devices, device) for device in range(2)]
    devices.run(lambda i: step(replicas[i].stages, order, tokens.chunk(MICROBATCHES), loss))
    found = whole_grads(schedule, replicas)
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return max(
        float((found[name] - own.grad).abs().max())
        for name, own in model.named_parameters()
        if own.grad is not None
    )
