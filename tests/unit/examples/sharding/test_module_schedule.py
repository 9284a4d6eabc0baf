"""Primitives on a plain GPT: losses and gradients are those of the plain one and one by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.sharding.models import GPT, Block
from examples.sharding.module_schedule import (
    ModuleSchedule,
    Replica,
    build,
    shard_block,
    step,
    whole_grads,
)
from examples.sharding.threads import Devices
from megapipe.errors import ConfigError
from megapipe.schedule.generators import build as generate

LAYERS, TOKENS, DEVICES = 3, (4, 6), 2


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(16, 8, 4, LAYERS).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(16, TOKENS, generator=generator) for _ in range(2))
    return tokens, labels


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: each.grad for name, each in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return {name: grad for name, grad in grads.items() if grad is not None}


def by_hand(model: GPT, tokens: Tensor) -> Tensor:
    """Return the logits of a GPT whose blocks are written for two devices, with lists of shards."""
    x = model.embedding(tokens)
    for block in model.blocks:
        assert isinstance(block, Block)
        x = x + _attention_by_hand(block, block.attention_norm(x))
        y, up, down = block.mlp_norm(x), block.mlp.up, block.mlp.down
        shards = zip(up.weight.chunk(2), up.bias.chunk(2), down.weight.chunk(2, 1), strict=True)
        x = x + down.bias + sum(F.gelu(y @ w.T + b) @ rows.T for w, b, rows in shards)
    return model.head(model.norm(x))


def _attention_by_hand(block: Block, y: Tensor) -> Tensor:
    own = block.attention
    total = own.out.bias.expand_as(y)
    for device in range(2):
        q, k, v = (
            F.linear(y, each.weight.chunk(2)[device], each.bias.chunk(2)[device])
            .unflatten(-1, (-1, own.head_dim))
            .transpose(1, 2)
            for each in (own.q, own.k, own.v)
        )
        scores = q @ k.mT / own.head_dim**0.5
        later = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1)
        heads = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        total = total + heads.transpose(1, 2).flatten(2) @ own.out.weight.chunk(2, 1)[device].T
    return total


def tensor_parallel(model: GPT) -> ModuleSchedule:
    schedule = ModuleSchedule(model, DEVICES)
    for index in range(LAYERS):
        shard_block(schedule, f"blocks.{index}")
    return schedule


def run(schedule: ModuleSchedule) -> tuple[Tensor, list[Replica]]:
    """Make a step of 1F1B with as many stages as there are, on two devices each."""
    tokens, labels = (each.chunk(4) for each in batch())
    devices = Devices(schedule.devices)
    order = generate("1f1b", ranks=len(schedule.cuts) + 1, microbatches=4)
    replicas = [build(schedule, devices, device) for device in range(schedule.devices)]

    def work(device: int) -> Tensor:
        return step(replicas[device].stages, order, tokens, lambda y, i: loss(y, labels[i]))

    first, *others = devices.run(work)
    assert all(torch.equal(first, other) for other in others)
    return first, replicas


def shards_only(schedule: ModuleSchedule) -> None:
    """Apply nothing more."""


def recomputed(schedule: ModuleSchedule) -> None:
    for index in range(LAYERS):
        schedule.checkpoint(f"blocks.{index}.mlp")
        schedule.checkpoint(f"blocks.{index}.attention")


def pipelined(schedule: ModuleSchedule) -> None:
    schedule.pipeline_split("blocks.0")
    schedule.pipeline_split("blocks.1")


def everything(schedule: ModuleSchedule) -> None:
    recomputed(schedule)
    pipelined(schedule)


@pytest.mark.parametrize("more", [shards_only, recomputed, pipelined, everything])
def test_primitives_change_neither_loss_nor_gradients(
    more: Callable[[ModuleSchedule], None], model: GPT
) -> None:
    before = {name: each.clone() for name, each in model.state_dict().items()}
    schedule = tensor_parallel(model)
    more(schedule)
    total, replicas = run(schedule)
    found = whole_grads(schedule, replicas)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    tokens, labels = batch()
    for forward in (model, lambda ids: by_hand(model, ids)):
        model.zero_grad()
        wanted = loss(forward(tokens), labels)
        wanted.backward()
        assert torch.allclose(total, wanted, rtol=1e-13)
        for name, grad in grads_of(model).items():
            assert torch.allclose(found[name], grad, rtol=0, atol=1e-12), name


def test_a_device_has_half_of_each_split_matrix(model: GPT) -> None:
    schedule = tensor_parallel(model)
    replica = build(schedule, Devices(2), 1)
    for name, dim in schedule.shards.items():
        shard, whole = replica.model.get_parameter(name), model.get_parameter(name)
        assert torch.equal(shard, whole.chunk(2, dim)[1])


def test_a_checkpoint_recomputes_in_the_backward(model: GPT, monkeypatch: Any) -> None:
    calls = []
    plain = F.gelu
    monkeypatch.setattr(F, "gelu", lambda x: calls.append(x) or plain(x))
    counts = []
    for names in ([], ["blocks.0.mlp", "blocks.2.mlp"]):
        schedule = ModuleSchedule(model, 1)
        for name in names:
            schedule.checkpoint(name)
        calls.clear()
        run(schedule)
        counts.append(len(calls))
    assert counts == [4 * LAYERS, 4 * (LAYERS + 2)]


def missing_sync(schedule: ModuleSchedule) -> Iterator[None]:
    for index in range(len(schedule.syncs)):
        left = schedule.syncs.pop(index)
        yield
        schedule.syncs.insert(index, left)


def test_a_missing_sync_is_seen_in_loss_or_gradients(model: GPT) -> None:
    schedule = tensor_parallel(model)
    tokens, labels = batch()
    loss(model(tokens), labels).backward()
    wanted = grads_of(model)
    for _ in missing_sync(schedule):
        devices = Devices(2)
        replicas = [build(schedule, devices, device) for device in range(2)]
        devices.run(lambda device, own=replicas: loss(own[device].model(tokens), labels).backward())
        found = whole_grads(schedule, replicas)
        assert any(not torch.allclose(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (
            lambda s: s.shard("blocks.9.mlp.up", "weight", 0),
            "no parameter 'blocks.9.mlp.up.weight'",
        ),
        (lambda s: s.shard("blocks.0.mlp.up", "weight", 2), "no 2 equal parts along dimension 2"),
        (lambda s: s.sync("blocks.0.mlp", "later"), "'later' is neither forward nor backward"),
        (lambda s: s.checkpoint("tail"), "checkpoint: the model has no module 'tail'"),
        (lambda s: s.pipeline_split("tail"), "pipeline_split: the model has no module 'tail'"),
    ],
)
def test_primitives_that_cannot_be(
    apply: Callable[[ModuleSchedule], None], message: str, model: GPT
) -> None:
    with pytest.raises(ConfigError, match=message):
        apply(ModuleSchedule(model, 2))


def test_a_cut_within_a_block_is_refused(model: GPT) -> None:
    schedule = ModuleSchedule(model, 1)
    schedule.pipeline_split("blocks.0.mlp")
    with pytest.raises(ConfigError, match=r"forward does not itself call 'blocks\.0\.mlp'"):
        build(schedule, Devices(1), 0)


def test_an_error_of_a_device_ends_the_others() -> None:
    devices = Devices(2)

    def work(device: int) -> Tensor:
        if device:
            raise ValueError("no memory")
        return devices.all_reduce(device, torch.ones(1))

    with pytest.raises(ValueError, match="no memory"):
        devices.run(work)
    assert devices.run(lambda device: float(devices.all_reduce(device, torch.ones(1)))) == [2, 2]
