"""The four operations of a model chunk."""

from __future__ import annotations

import pytest
import reference
import torch
from parity import Case, configure, take_box
from torch import Tensor

from megapipe.engine.stage import Stage
from megapipe.mesh import Axis
from megapipe.model.gpt import GPTStage
from megapipe.model.microbatch import MicroBatch
from megapipe.model.partition import StageSpec
from megapipe.optim.buffers import Bucket, owned_parameters
from megapipe.tensor_parallel.parameter import Sharding, spec_of

CONFIG, _ = configure(Case(tied=False, layers=2))
PARAMS = reference.init_random(CONFIG.model, seed=3)
TOKENS, LABELS, MASK = reference.random_batch(CONFIG.model, 2, 8, seed=4, masked=0.3)
COUNT = int(MASK.sum())
MB = MicroBatch(index=0, step=0, seed=1, tokens=TOKENS, labels=LABELS, mask=MASK, scale=1 / COUNT)


def new_stage(*, embedding: bool = True, head: bool = True) -> tuple[Stage, Bucket]:
    spec = StageSpec(embedding=embedding, layers=range(2), head=head)
    module = GPTStage(CONFIG.model, spec, Sharding(Axis.alone(), False, torch.float64))
    bucket = Bucket(0, list(owned_parameters(module)), Axis.alone(), torch.device("cpu"))
    for entry in bucket.entries:
        take_box(PARAMS[entry.spec.name], entry.spec, bucket.view(bucket.weights, entry))
    stage = Stage(module)
    stage.own_autograd_parameters()
    return stage, bucket


def main_grads(bucket: Bucket) -> dict[str, Tensor]:
    result = {}
    for entry in bucket.entries:
        rows = tuple(slice(n) for n in entry.spec.shape)
        result[entry.spec.name] = bucket.view(bucket.grads[0], entry)[rows].clone()
    return result


def test_a_whole_model_as_one_stage() -> None:
    stage, bucket = new_stage()
    assert (stage.is_first, stage.is_last) == (True, True)
    assert stage.forward(0, None, MB) is None, "the last stage passes nothing on"
    assert stage.input_grad(0, None) is None, "nor does the first backward"
    early = {name for name, grad in main_grads(bucket).items() if grad.any()}
    assert early == {name for name in PARAMS if "norm" in name}, "I computes those of norms alone"
    stage.weight_grad(0)
    loss, grads = reference.loss_and_grads(PARAMS, CONFIG.model, (TOKENS, LABELS, MASK))
    reference.assert_grads_close(main_grads(bucket), grads)
    assert abs(stage.loss_sums[0].item() / COUNT - loss) < 1e-12


def test_micro_batches_in_flight_do_not_touch_each_other() -> None:
    stage, bucket = new_stage(embedding=False, head=False)
    xs = [torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    xs = [x.double() for x in xs]
    ys = [stage.forward(i, x, MB) for i, x in enumerate(xs)]
    gs = {i: stage.input_grad(i, torch.ones_like(y)) for i, y in enumerate(ys) if y is not None}
    for i in (2, 0, 1):
        stage.weight_grad(i)
    total = main_grads(bucket)
    bucket.zero_grad()
    for i, x in enumerate(xs):
        y = stage.forward(i, x, MB)
        assert y is not None
        assert not y.requires_grad, "what is passed on has no graph"
        assert y.equal(ys[i])
        g = stage.input_grad(i, torch.ones_like(y))
        stage.weight_grad(i)
        assert g is not None
        assert g.equal(gs[i])
        assert not x.requires_grad, "the message is left as it came"
    reference.assert_grads_close(main_grads(bucket), total, 1e-12)


def test_evaluation_builds_no_graph_and_has_no_dropout() -> None:
    stage, bucket = new_stage()
    stage.evaluate(0, None, MB)
    loss = reference.loss(PARAMS, CONFIG.model, TOKENS, LABELS, MASK)
    assert abs(stage.loss_sums[0].item() / COUNT - loss) < 1e-12
    assert not stage.module.training
    with pytest.raises(KeyError):
        stage.input_grad(0, None)
    assert not any(grad.any() for grad in bucket.grads)


def test_reset_forgets_an_unfinished_step() -> None:
    stage, _ = new_stage()
    stage.forward(0, None, MB)
    stage.input_grad(0, None)
    stage.forward(1, None, MB)
    stage.reset()
    assert not stage.loss_sums
    assert not stage.queue.pending()
    with pytest.raises(KeyError):
        stage.input_grad(1, None)
    stage.forward(0, None, MB)
    stage.input_grad(0, None)
    stage.weight_grad(0)


def test_every_parameter_keeps_its_name() -> None:
    stage, _ = new_stage()
    shapes = {spec_of(p).name: spec_of(p).shape for p in stage.module.parameters()}
    assert shapes == reference.shapes(CONFIG.model)
