"""Costs of stages: against the products that a stage is seen to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.layers.microbatch import MicroBatch
from megapipe.layout.activations import block_policies, uniform_recompute
from megapipe.layout.costs import stage_work
from megapipe.layout.model_spec import model_spec_of
from megapipe.layout.resolve import resolve
from megapipe.model.partition import parse_layout
from tests.parity import reference
from tests.parity.families import token_flops
from tests.parity.ranks import Case, configure
from tests.parity.stage_cases import new_stage

ROWS, LENGTH = 2, 8
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "keep": {},
    "full": {"policy": "full"},
    "pairs": {"policy": "full", "blocks_per_recompute": 2},
    "some": {"policy": "full", "num_blocks": 1},
    "attention": {"policy": "selective", "modules": ["attention"]},
    "norm": {"policy": "selective", "modules": ["norm", "mlp_activation"]},
    "stage": {"policy": "stage"},
}


class Products(TorchDispatchMode):
    """A counter of the FLOPs of GEMMs; attention has whole scores, twice in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if name in ("mm", "addmm", "addmm_", "bmm", "baddbmm_"):
            a, b = [each for each in args if isinstance(each, torch.Tensor)][-2:]
            if len(a) > 1:  # a row of ones sums up the gradients of a norm
                self.flops += 2 * a.numel() * b.shape[-1]
        elif "scaled_dot_product" in name:
            backward = "backward" in name
            q = args[1] if backward else args[0]  # [b, heads, s, d]
            self.flops += (2 if backward else 1) * 4 * q.numel() * q.shape[2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("chunk", [0, 4])
def test_counted(kind: str, policy: str, chunk: int) -> None:
    """Every product of F, R, I and W of a first, an inner and a last stage."""
    config, _ = configure(Case(model=kind, tied=False, layers=6))
    config = config.model_copy(
        update={
            "activations": config.activations.model_copy(update=POLICIES[policy]),
            "kernels": config.kernels.model_copy(update={"loss_chunk_tokens": chunk}),
            "train": config.train.model_copy(update={"sequence_length": LENGTH}),
        }
    )
    model = config.model
    tokens, labels, mask = reference.random_batch(model, ROWS, LENGTH, seed=0, masked=0.3)
    mb = MicroBatch(0, 0, 1, tokens, labels, mask, scale=1 / 16)
    specs = parse_layout("E L*2 | L*2 | L*2 H", 6)
    again = frozenset(range(3) if policy == "stage" else ())
    spans = block_policies(config.activations, specs, again)
    params = reference.init_random(model, seed=3)
    hidden = torch.randn(LENGTH, ROWS, model.hidden, dtype=torch.float64)
    for index, work in enumerate(stage_work(model_spec_of(config), specs, spans, again)):
        spec = specs[index]
        stage, _ = new_stage(model, params, spec, spans=spans[index], recompute=index in again)
        sharding = stage.module.sharding
        stage.module.sharding = replace(
            sharding, kernels=replace(sharding.kernels, loss_chunk=chunk)
        )
        found = {}
        with Products() as found["F"]:
            stage.forward((0, 0), None if spec.embedding else hidden, mb)
        if again:
            with Products() as found["R"]:
                stage.recompute((0, 0))
        with Products() as found["I"]:
            stage.input_grad((0, 0), None if spec.head else hidden)
        with Products() as found["W"]:
            stage.weight_grad((0, 0))
        counted = {name: counter.flops for name, counter in found.items()}
        expected = {name: getattr(work, name) * ROWS * LENGTH for name in counted}
        assert counted == expected, spec
        assert again or work.R == 0


def known(size: int | None) -> int:
    assert size is not None
    return size


def settle(*overrides: str) -> tuple[Config, tuple[int, ...]]:
    """Return a configuration and the work of its stages."""
    config, layout = resolve(parse(list(overrides)).config, None, None)
    F, B, _, _, R, *_ = layout.cost.table(layout.stages)
    return config, tuple(sum(each) for each in zip(F, B, R, strict=True))


def test_of_the_whole_model() -> None:
    """Three times the forward, whatever the stages and however the loss is computed."""
    for extra in ((), ("kernels.loss_chunk_tokens=0",), ("parallel.pp=4",)):
        config, work = settle("model.vocab_size=512", *extra)
        assert sum(work) == token_flops(config.model, config.train.sequence_length)


@pytest.mark.parametrize("loss_chunk", [0, 256])
@pytest.mark.parametrize(
    "policy", ["keep", "full", "selective", "stage", "[full, keep, full, keep]"]
)
def test_parts_make_stages(policy: str, loss_chunk: int) -> None:
    """What layers are shared out by is what stages then cost, but for what the ends are spared."""
    config, work = settle(
        "model.layers=9",
        "parallel.pp=4",
        "model.vocab_size=512",
        "pipeline.stage_layout=[2, 2, 2, 3]",
        f"activations.policy={policy}",
        f"kernels.loss_chunk_tokens={loss_chunk}",
    )
    costs = model_spec_of(config).unit_costs(uniform_recompute(config.activations))
    embedding, layer, head = costs[0], costs[1], costs[-1]
    assert embedding == 0
    assert set(costs[1:-1]) == {layer}
    if policy.startswith("["):
        config, kept = settle("model.layers=9", "model.vocab_size=512")
        assert sum(model_spec_of(config).unit_costs(uniform_recompute(config.activations))) == sum(
            kept
        )
        assert sum(work) > sum(kept)
        return
    last = 2 * config.model.hidden * known(config.model.ffn_hidden) * (policy == "stage")
    assert work == (*[2 * layer - last] * 3, 3 * layer - last + head)
