"""The last stage with head and loss in chunks, all of which is done within ``I``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.engine.stage import Stage
from megapipe.layers.microbatch import MicroBatch
from megapipe.ops.kernels import Kernels
from megapipe.optim.buffers import Bucket
from tests.parity import reference
from tests.parity.ranks import Case, configure
from tests.parity.stage_cases import main_grads, new_stage

CONFIG, _ = configure(Case(layers=2))
PARAMS = reference.init_random(CONFIG.model, seed=3)
BATCH = reference.random_batch(CONFIG.model, 2, 8, seed=4, masked=0.3)
COUNT = int(BATCH[2].sum())
MB = MicroBatch(0, 0, 1, *BATCH, scale=1 / COUNT)


def stage_with(chunk: int, *, recompute: bool = False) -> tuple[Stage, Bucket]:
    stage, bucket = new_stage(CONFIG.model, PARAMS, recompute=recompute)
    module: Any = stage.module
    module.sharding = replace(module.sharding, kernels=Kernels(loss_chunk=chunk))
    return stage, bucket


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_a_stage_with_a_chunked_loss(chunk: int, recompute: bool) -> None:
    stage, bucket = stage_with(chunk, recompute=recompute)
    stage.forward((0, 0), None, MB)
    stage.input_grad((0, 0), None)
    assert bucket.grads[1].any(), "the head's weight gradient is computed within I"
    within = bucket.grads[1].clone()
    stage.weight_grad((0, 0))
    assert bucket.grads[1].equal(within)
    bucket.sum_tied_grads()
    loss, grads = reference.loss_and_grads(PARAMS, CONFIG.model, BATCH)
    reference.assert_grads_close(main_grads([bucket]), grads, 1e-12)
    assert abs(stage.loss_sums[0, 0].item() / COUNT - loss) < 1e-12


def test_the_value_of_a_loss_whose_backward_is_to_come_is_not_a_number() -> None:
    stage, _ = stage_with(5)
    stage.forward((0, 0), None, MB)
    assert stage.loss_sums[0, 0].isnan()
    stage.input_grad((0, 0), None)
    trained = stage.loss_sums[0, 0].clone()
    stage.begin(train=False)
    stage.evaluate((0, 0), None, MB)
    assert stage.loss_sums[0, 0].equal(trained)


def test_between_forward_and_backward_no_logits_are_kept() -> None:
    kept = {}
    for chunk in (0, 5):
        stage, _ = stage_with(chunk)
        sizes: list[int] = []

        def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            stage.forward((0, 0), None, MB)
        kept[chunk] = sum(sizes)
    tokens, columns = BATCH[0].numel(), stage.module.head.weight.shape[0]  # type: ignore[union-attr]
    assert kept[0] - kept[5] >= tokens * columns
