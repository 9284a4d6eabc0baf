"""Versions of a bucket's weights, and what a backward reads of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter, functional

from megapipe.config.config import OptimizerConfig
from megapipe.distributed.mesh import Axis
from megapipe.layers.offload import ActivationOffload
from megapipe.layers.recompute import save_all
from megapipe.layers.weight_grad import accumulate_in_main_grad
from megapipe.optim.rules import build_rule
from megapipe.optim.state_store import StatePolicy
from megapipe.optim.weight_versions import WeightVersions
from tests.parity.optim_rules import make_shard

ALONE = Axis.alone()


def versions_of(kept: int, *, turns: bool = False) -> tuple[WeightVersions, Parameter]:
    """Return the versions of a shard, from version 0 on, and the weight of a norm in it."""
    rule = build_rule(OptimizerConfig())
    shard = make_shard(rule, ALONE, ALONE, policy=StatePolicy(separate_masters=True))
    versions = WeightVersions(shard, kept, turns=turns, predicted=0, predict=lambda *given: None)
    versions.begin(0)
    norm = next(
        each.parameter
        for each in shard.bucket.placed
        if each.entry.spec.name.endswith("norm.weight")
    )
    return versions, norm


def update(versions: WeightVersions, value: float) -> None:
    """Make the next version, with one value everywhere."""
    versions.advance()
    versions.weights[0].fill_(value)


def normed(norm: Parameter) -> Callable[[Tensor], Tensor]:
    return lambda x: functional.layer_norm(x, norm.shape, norm)


def input_grad(y: Tensor, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(y[:, 0].sum(), x, retain_graph=True)
    return grad


def test_the_backward_of_a_norm_reads_what_its_parameter_points_at_by_then() -> None:
    """The parameter is therefore pointed at the version of the forward before each backward."""
    versions, norm = versions_of(2)
    x = torch.randn(3, len(norm), dtype=torch.float64, requires_grad=True)
    y = normed(norm)(x)
    wanted = input_grad(y, x)
    update(versions, 3.0)
    versions.use(1)
    assert not torch.allclose(input_grad(y, x), wanted)
    versions.use(0)
    assert torch.equal(input_grad(y, x), wanted)


def test_what_is_offloaded_reads_the_version_of_its_forward_for_good() -> None:
    """So activations are not offloaded if a backward reads other weights than its forward."""
    versions, norm = versions_of(2)
    x = torch.randn(3, len(norm), dtype=torch.float64, requires_grad=True)
    segment = cast(Any, lambda x, skip_output=False: normed(norm)(x))
    y = ActivationOffload().offload(save_all, segment, x)
    wanted = input_grad(y, x)
    update(versions, 3.0)
    versions.use(1)
    assert torch.equal(input_grad(y, x), wanted)


def test_an_update_writes_the_oldest_version_and_moves_none() -> None:
    versions, norm = versions_of(3)
    places = {buffer.data_ptr() for buffer in versions.weights}
    for number in range(1, 7):
        before = [buffer.clone() for buffer in versions.weights]
        update(versions, float(number))
        assert {buffer.data_ptr() for buffer in versions.weights} == places
        for old, buffer in zip(before[:2], versions.weights[1:], strict=True):
            assert torch.equal(old, buffer)
    for number in (6, 4, 5, 4):
        versions.use(number)
        assert bool((norm == number).all())
    with pytest.raises(AssertionError, match="version 3, the newest is 6"):
        versions.use(3)


def test_gradients_of_norms_go_where_those_of_their_window_add_up() -> None:
    """So it is where they arrive before the update of the window before."""
    versions, norm = versions_of(2, turns=True)
    accumulate_in_main_grad(norm)
    x = torch.ones(1, len(norm), dtype=torch.float64)
    sums = []
    for scale in (1.0, 10.0):
        (norm * x * scale).sum().backward()
        sums.append(cast(Any, norm).main_grad)
        versions.switch_accumulator()
    assert [float(each[0]) for each in sums[1:]] == [10.0]
    assert float(sums[0][0]) == 0.0, "the first sum is taken up again for the third window"
    assert cast(Any, norm).main_grad.data_ptr() == sums[0].data_ptr()
