"""A stage that recomputes gives the same bits and keeps less."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from torch import Tensor

from megapipe.layers.microbatch import MicroBatch
from megapipe.model.partition import StageSpec
from tests.parity import reference
from tests.parity.ranks import Case, configure
from tests.parity.stage_cases import main_grads, new_pipeline, new_stage

MODEL = configure(Case(tied=False, layers=3, dropout=0.5))[0].model
PARAMS = reference.init_random(MODEL, seed=3)
MIDDLE = StageSpec(embedding=False, layers=range(3), head=False)


def microbatch(index: int) -> MicroBatch:
    tokens, labels, mask = reference.random_batch(MODEL, 2, 8, seed=index, masked=0.3)
    return MicroBatch(index, 0, 1, tokens, labels, mask, scale=1 / 16)


def run(*, recompute: bool, ahead: tuple[int, ...] = ()) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run two micro-batches through two stages; those of `ahead` have an R at every stage."""
    stages, buckets = new_pipeline(MODEL, PARAMS, (1, 2), recompute=recompute)
    x: Tensor | None
    for i in range(2):
        x = None
        for stage in stages:
            x = stage.forward((i, 0), x, microbatch(i))
    for i in range(2):
        x = None
        for stage in reversed(stages):
            if i in ahead:
                stage.recompute((i, 0))
            x = stage.input_grad((i, 0), x)
            stage.weight_grad((i, 0))
    return [stages[-1].loss_sums[i, 0] for i in range(2)], main_grads(buckets)


@pytest.mark.parametrize("ahead", [(), (0,), (1,), (0, 1)])
def test_losses_and_gradients_are_the_same_bitwise(ahead: tuple[int, ...]) -> None:
    plain_sums, plain = run(recompute=False)
    sums, grads = run(recompute=True, ahead=ahead)
    assert all(map(torch.equal, sums, plain_sums))
    assert grads.keys() == plain.keys()
    assert all(grads[name].equal(plain[name]) for name in plain)
    assert all(grad.any() for name, grad in grads.items() if name != "embedding.position.weight")


def test_the_forward_saves_nothing_until_the_graph_is_due() -> None:
    stage, _ = new_stage(MODEL, PARAMS, MIDDLE, recompute=True)
    saves: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        saves.append(tensor.shape)
        return tensor

    x = torch.randn(8, 2, 16, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = stage.forward((0, 0), x, microbatch(0))
        assert y is not None
        assert not y.requires_grad
        assert not saves
        stage.recompute((0, 0))
        assert saves
        first = len(saves)
        stage.input_grad((0, 0), torch.ones_like(y))
        assert len(saves) == first, "R took the place of the recomputation in I"
    assert not x.requires_grad, "the message is left as it came"


def test_the_input_is_kept_until_its_backward_and_no_longer() -> None:
    stage, _ = new_stage(MODEL, PARAMS, MIDDLE, recompute=True)
    for ahead, key in itertools.product((False, True), ((0, 0), (1, 0))):
        x = torch.randn(8, 2, 16, dtype=torch.float64)
        storage = weakref.ref(x.untyped_storage())
        y = stage.forward(key, x, microbatch(0))
        del x
        assert y is not None
        if ahead:
            stage.recompute(key)
        assert storage() is not None
        stage.input_grad(key, torch.ones_like(y))
        stage.weight_grad(key)
        assert storage() is None


def test_an_op_without_its_forward_is_an_error() -> None:
    stage, _ = new_stage(MODEL, PARAMS, recompute=True)
    stage.forward((0, 0), None, microbatch(0))
    stage.recompute((0, 0))
    with pytest.raises(KeyError):
        stage.recompute((0, 0))
    stage.forward((1, 0), None, microbatch(1))
    stage.begin(train=True)
    for key in ((0, 0), (1, 0)):
        with pytest.raises(KeyError):
            stage.recompute(key)
        with pytest.raises(KeyError):
            stage.input_grad(key, None)


def test_only_the_graph_is_made_again() -> None:
    """The values of the output are there already."""
    stage, _ = new_stage(MODEL, PARAMS, recompute=True)
    seen: list[object] = []
    stage.module.register_forward_pre_hook(
        lambda module, given, named: seen.append(named.get("skip_output", False)), with_kwargs=True
    )
    for number in range(2):
        stage.forward((number, 0), None, microbatch(number))
    stage.recompute((0, 0))
    for number in range(2):
        stage.input_grad((number, 0), None)
    assert seen == [False, False, True, True]


def test_the_loss_is_recorded_by_the_forward_alone() -> None:
    stage, _ = new_stage(MODEL, PARAMS, recompute=True)
    stage.forward((0, 0), None, microbatch(0))
    recorded = stage.loss_sums[0, 0]
    stage.recompute((0, 0))
    assert stage.loss_sums[0, 0] is recorded
