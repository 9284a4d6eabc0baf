"""The four operations of a model chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import spec_of
from megapipe.model.partition import StageSpec
from tests.parity import reference
from tests.parity.ranks import Case, configure
from tests.parity.stage_cases import main_grads, new_stage

CONFIG, _ = configure(Case(tied=False, layers=2))
PARAMS = reference.init_random(CONFIG.model, seed=3)
TOKENS, LABELS, MASK = reference.random_batch(CONFIG.model, 2, 8, seed=4, masked=0.3)
COUNT = int(MASK.sum())
MB = MicroBatch(index=0, step=0, seed=1, tokens=TOKENS, labels=LABELS, mask=MASK, scale=1 / COUNT)
MIDDLE = StageSpec(embedding=False, layers=range(2), head=False)


def test_a_whole_model_as_one_stage() -> None:
    stage, bucket = new_stage(CONFIG.model, PARAMS)
    assert (stage.is_first, stage.is_last) == (True, True)
    assert stage.forward((0, 0), None, MB) is None, "the last stage passes nothing on"
    assert stage.input_grad((0, 0), None) is None, "nor does the first backward"
    early = {name for name, grad in main_grads([bucket]).items() if grad.any()}
    assert early == {name for name in PARAMS if "norm" in name}, "I computes those of norms alone"
    unit = stage._unit
    stage.weight_grad((0, 0))
    loss, grads = reference.loss_and_grads(PARAMS, CONFIG.model, (TOKENS, LABELS, MASK))
    reference.assert_grads_close(main_grads([bucket]), grads)
    assert abs(stage.loss_sums[0, 0].item() / COUNT - loss) < 1e-12
    stage.forward((1, 0), None, MB)
    assert stage._unit is unit, "every loss has the same gradient by itself"


def test_micro_batches_in_flight_do_not_touch_each_other() -> None:
    stage, bucket = new_stage(CONFIG.model, PARAMS, MIDDLE)
    xs = [torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    xs = [x.double() for x in xs]
    ys = [stage.forward((i, 0), x, MB) for i, x in enumerate(xs)]
    gs = {
        i: stage.input_grad((i, 0), torch.ones_like(y)) for i, y in enumerate(ys) if y is not None
    }
    for i in (2, 0, 1):
        stage.weight_grad((i, 0))
    total = main_grads([bucket])
    bucket.zero_grad()
    for i, x in enumerate(xs):
        y = stage.forward((i, 0), x, MB)
        assert y is not None
        assert not y.requires_grad, "what is passed on has no graph"
        assert y.equal(ys[i])
        g = stage.input_grad((i, 0), torch.ones_like(y))
        stage.weight_grad((i, 0))
        assert g is not None
        assert g.equal(gs[i])
        assert not x.requires_grad, "the message is left as it came"
    reference.assert_grads_close(main_grads([bucket]), total, 1e-12)


def test_evaluation_builds_no_graph_and_has_no_dropout() -> None:
    stage, bucket = new_stage(CONFIG.model, PARAMS)
    stage.begin(train=False)
    stage.evaluate((0, 0), None, MB)
    loss = reference.loss(PARAMS, CONFIG.model, TOKENS, LABELS, MASK)
    assert abs(stage.loss_sums[0, 0].item() / COUNT - loss) < 1e-12
    assert not stage.module.training
    with pytest.raises(KeyError):
        stage.input_grad((0, 0), None)
    assert not any(grad.any() for grad in bucket.grads)


@pytest.mark.parametrize("back", [None, 2])
def test_what_is_set_aside_goes_on_where_it_was(back: int | None) -> None:
    """Micro-batches keep their numbers, or take those of a window later."""
    stage, bucket = new_stage(CONFIG.model, PARAMS)
    stage.forward((3, 0), None, MB)
    kept = stage.suspend_in_flight()
    with pytest.raises(KeyError):
        stage.input_grad((3, 0), None)
    if back is None:
        stage.restore_in_flight(kept)
    else:
        stage.restore_in_flight(kept, back=back)
    number = 3 - (back or 0)
    assert [*stage.loss_sums] == [(number, 0)]
    stage.input_grad((number, 0), None)
    stage.weight_grad((number, 0))
    _, grads = reference.loss_and_grads(PARAMS, CONFIG.model, (TOKENS, LABELS, MASK))
    reference.assert_grads_close(main_grads([bucket]), grads)


def test_beginning_forgets_an_unfinished_step() -> None:
    stage, _ = new_stage(CONFIG.model, PARAMS)
    stage.forward((0, 0), None, MB)
    stage.input_grad((0, 0), None)
    stage.forward((1, 0), None, MB)
    stage.begin(train=True)
    assert not stage.loss_sums
    assert not stage.queue.pending()
    with pytest.raises(KeyError):
        stage.input_grad((1, 0), None)
    stage.forward((0, 0), None, MB)
    stage.input_grad((0, 0), None)
    stage.weight_grad((0, 0))


def test_a_step_begins_with_dropout_where_it_trains() -> None:
    dropping = CONFIG.model.model_copy(update={"dropout": 0.5})
    stage, _ = new_stage(dropping, PARAMS)
    sums = []
    for train in (False, True, True, False):
        stage.begin(train=train)
        stage.forward((0, 0), None, MB)
        sums.append(stage.loss_sums[0, 0].item())
    without = reference.loss(PARAMS, CONFIG.model, TOKENS, LABELS, MASK)
    assert abs(sums[0] / COUNT - without) < 1e-12
    assert sums[1] == sums[2] != sums[0] == sums[3]


def test_beginning_forgets_the_keys_and_values_of_slices() -> None:
    stage, _ = new_stage(CONFIG.model, PARAMS)
    slices = [
        replace(
            MB,
            tokens=TOKENS[:, start : start + 4],
            labels=LABELS[:, start : start + 4],
            mask=MASK[:, start : start + 4],
            start=start,
            sequence_length=8,
        )
        for start in (0, 4)
    ]
    stage.forward((0, 0), None, slices[0])
    stage.begin(train=True)
    with pytest.raises(KeyError):
        stage.forward((0, 1), None, slices[1])


def test_every_parameter_keeps_its_name() -> None:
    stage, _ = new_stage(CONFIG.model, PARAMS)
    shapes = {spec_of(p).name: spec_of(p).shape for p in stage.module.parameters()}
    assert shapes == reference.shapes(CONFIG.model)
