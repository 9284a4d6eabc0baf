"""Each update rule in one process, against torch's or a plain one on whole tensors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.config.config import OptimizerConfig
from megapipe.config.update_rules import RULES, MuonOptions
from megapipe.distributed.mesh import Axis
from megapipe.optim.rules import build_rule, layerwise
from megapipe.optim.rules import rule as rule_module
from megapipe.optim.rules.full_matrices import deal
from megapipe.optim.rules.muon import orthogonalise
from megapipe.optim.state_store import StatePolicy
from tests.parity.optim_rules import (
    PLAIN,
    RATES,
    assemble,
    draw,
    error,
    expected,
    is_hidden,
    make_shard,
    model,
    run_rule,
    set_grad,
)
from tests.parity.plain_rules import matrices_of

ALONE = Axis.alone()
TOLERANCE = 1e-12


@pytest.mark.parametrize("name", PLAIN)
def test_a_rule_does_what_its_plain_form_does(name: str) -> None:
    assert error(assemble([run_rule(name, ALONE, ALONE)]), expected(name)) < TOLERANCE


PIECEMEAL = StatePolicy(place="host", window_bytes=1)
"""State in host memory, fetched in the smallest windows possible."""


@pytest.mark.parametrize("name", PLAIN)
def test_state_that_comes_in_windows_gives_the_same(name: str) -> None:
    found = run_rule(name, ALONE, ALONE, policy=PIECEMEAL)
    assert error(assemble([found]), expected(name)) < TOLERANCE
    if RULES[PLAIN[name].config.rule].elementwise:
        assert (found.master == run_rule(name, ALONE, ALONE).master).all(), "not a bit differs"


@pytest.mark.parametrize(
    "name", ["lion", "lars", "lamb", "rmsprop", "nadamw", "adabelief", "adam3"]
)
def test_blocks_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_module, "CPU_BLOCK", 50)
    assert error(assemble([run_rule(name, ALONE, ALONE)]), expected(name)) < TOLERANCE


@pytest.mark.parametrize("name", ["lars", "lamb", "muon"])
def test_rules_of_two_passes_keep_bf16_state(name: str) -> None:
    """The second pass gives states back that it has not touched."""
    policy = StatePolicy(state_dtype="bf16", rounding="nearest", window_bytes=1)
    found = assemble([run_rule(name, ALONE, ALONE, dtype="fp32", policy=policy)])
    exact = assemble([run_rule(name, ALONE, ALONE, dtype="fp32")])
    assert 0 < error(found, exact) < 1e-2


def test_norms_of_all_parameters_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One vector per bucket over its slices, one for all buckets over tp."""
    sent: list[torch.Size] = []

    def spy(tensor: Tensor, axis: Axis) -> Tensor:
        sent.append(tensor.shape)
        return tensor

    monkeypatch.setattr(layerwise, "all_reduce", spy)
    monkeypatch.setattr(layerwise, "all_gather", spy)
    rule = build_rule(PLAIN["lamb"].config)
    shards = [make_shard(rule, ALONE, ALONE) for _ in range(2)]
    for shard in shards:
        set_grad(shard, draw(model(), "grad", 0, torch.float64), torch.float64)
    rule.step(shards, 0.1, 0)
    n = len(shards[0].bucket.entries)
    assert sent == [(n, 2), (n, 2), (1, 2 * n, 2)]


@pytest.mark.parametrize(
    ("name", "of_qkv"), [("muon", 3), ("muon original", 1), ("muon by head", 16)]
)
def test_muon_in_fp32_is_torch_s_bit_by_bit(name: str, of_qkv: int) -> None:
    """Newton-Schulz runs in bf16, on the same matrices: gate and up apart, and what is split of
    queries, keys and values. Where these have factors of their own, each is a product more."""
    found = assemble([run_rule(name, ALONE, ALONE, dtype="fp32")])
    config = PLAIN[name].config
    options = config.rule_options
    assert isinstance(options, MuonOptions)

    def matrices(n: str, whole: Tensor) -> list[Tensor]:
        parts = [whole[rows] for rows in matrices_of(options.split_qkv, n, model())]
        return [m for part in parts for m in part.reshape(-1, *part.shape[-2:])]

    weights = {n: w for n, w in draw(model(), "weight", 0, torch.float32).items() if is_hidden(n)}
    parameters = {n: [Parameter(m.clone()) for m in matrices(n, w)] for n, w in weights.items()}
    assert len(parameters["layers.0.attention.qkv.weight"]) == of_qkv
    assert len(parameters["layers.0.mlp.up.weight"]) == 2
    rule = torch.optim.Muon(
        [p for several in parameters.values() for p in several],
        weight_decay=config.weight_decay,
        momentum=options.momentum,
        nesterov=options.nesterov,
        adjust_lr_fn=options.adjust_lr_fn,
    )
    for step, lr in enumerate(RATES):
        rule.param_groups[0]["lr"] = lr
        grads = draw(model(), "grad", step, torch.float32)
        for n, several in parameters.items():
            for p, grad in zip(several, matrices(n, grads[n]), strict=True):
                p.grad = grad.clone()
        rule.step()
    for n, several in parameters.items():
        scaled = of_qkv == 3 and "qkv" in n
        for ours, p in zip(matrices(n, found[n]), several, strict=True):
            rtol = 1e-6 if scaled else 0
            torch.testing.assert_close(ours, p.detach().double(), rtol=rtol, atol=0, msg=n)


def test_orthogonalised_matrices_are_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    for shape in ((6, 10), (10, 6), (2, 5, 9)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, dtype=torch.float64)))
        assert 0.5 < values.min() <= values.max() < 1.3
    assert not orthogonalise(torch.zeros(3, 4)).any(), "no gradient, no step"


def step_once(settings: dict[str, Any], weight: float, grad: float) -> tuple[Tensor, Tensor]:
    """Return the head's weights before and after one step, all weights and gradients alike."""
    rule = build_rule(OptimizerConfig.model_validate(settings))
    shard = make_shard(rule, ALONE, ALONE)
    (head,) = [e for e in shard.bucket.entries if e.spec.name == "head.weight"]
    used = slice(head.start, head.start + 11 * 12)
    shard.store.read("model", 0, shard.stop)[used] = weight
    before = shard.store.read("model", 0, shard.stop)[used].clone()
    shard.grad = torch.zeros(shard.stop, dtype=torch.float64)
    shard.grad[used] = grad
    rule.step([shard], 0.5, 0)
    return before, shard.store.read("model", 0, shard.stop)[used]


@pytest.mark.parametrize("name", PLAIN)
def test_weight_decay_ends_where_norms_and_biases_begin(name: str) -> None:
    """No padding is between them and the matrices that decay. Gradients are zero."""
    rule = build_rule(PLAIN[name].config)
    shard = make_shard(rule, ALONE, ALONE, hidden=16)
    master = shard.store.read("model", 0, shard.stop)
    before = master.clone()
    shard.grad = torch.zeros_like(master)
    rule.step([shard], 0.1, 0)
    pairs = [*pairwise(shard.bucket.entries)]
    assert all(a.stop == b.start for a, b in pairs if a.spec.decay != b.spec.decay)
    for entry in shard.bucket.entries:
        unchanged = master[entry.start : entry.stop].equal(before[entry.start : entry.stop])
        assert unchanged == (not entry.spec.decay), entry.spec.name


@pytest.mark.parametrize("rule", ["lars", "lamb"])
def test_a_zero_norm_has_trust_ratio_1(rule: str) -> None:
    settings = {"rule": rule, "weight_decay": 0.0}
    before, after = step_once(settings, weight=0.0, grad=1.0)
    torch.testing.assert_close(after, before - 0.5, rtol=1e-7, atol=0)
    before, after = step_once(settings, weight=2.0, grad=0.0)
    assert after.equal(before)


def test_lamb_moves_a_matrix_by_its_norm_and_lars_by_a_share_of_it() -> None:
    before, after = step_once({"rule": "lamb"}, weight=2.0, grad=1e-3)
    assert ((after - before).norm() / before.norm()).item() == pytest.approx(0.5, rel=1e-12)
    settings = {"rule": "lars", "weight_decay": 0.0, "options": {"trust_coefficient": 0.02}}
    before, after = step_once(settings, weight=2.0, grad=1e-3)
    assert ((after - before).norm() / before.norm()).item() == pytest.approx(0.01, rel=1e-12)


def test_muon_scales_the_learning_rate_of_what_takes_adamw() -> None:
    settings = {"rule": "muon", "weight_decay": 0.0}
    before, after = step_once(settings | {"options": {"adamw_lr_scale": 0.1}}, weight=2.0, grad=1.0)
    torch.testing.assert_close(after, before - 0.05, rtol=1e-7, atol=0)


def test_momentum_is_kept_only_where_there_is_some() -> None:
    assert build_rule(PLAIN["sgd"].config).states == ("momentum_buffer",)
    assert build_rule(PLAIN["sgd plain"].config).states == ()
    assert build_rule(PLAIN["rmsprop"].config).states == ("square_avg", "momentum_buffer")
    assert build_rule(PLAIN["rmsprop plain"].config).states == ("square_avg",)


def test_work_is_dealt_evenly_and_all_of_it() -> None:
    work = [4.0, 1.0, 3.0, 3.0, 1.0]
    dealt = deal(work, 2)
    assert sorted(i for hand in dealt for i in hand) == [0, 1, 2, 3, 4]
    assert [sum(work[i] for i in hand) for hand in dealt] == [6.0, 6.0]
    assert deal([1.0], 3) == [[0], [], []]
