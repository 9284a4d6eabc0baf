"""Bytes of a process by hand; what it does allocate is in tests/unit/test_large_worlds.py."""

from __future__ import annotations

import pytest

from megapipe.cli import parse
from megapipe.layout.resolve import resolve
from megapipe.plan.memory import model_memory
from tests.parity.families import count_held

SMALL = (
    "model.layers=4",
    "model.hidden=64",
    "model.vocab_size=1024",
    "model.tied_embeddings=false",
    "model.positions=rotary",
    "parallel.dp=4",
    "train.global_batch=32",
)


def memory(*keys: str) -> tuple[tuple[int, ...], int]:
    """Return the bytes of the first pipeline rank by purpose, and its number of parameters."""
    config, layout = resolve(parse([*SMALL, *keys]).config, None, None)
    found = model_memory(config, layout, 0)
    stages = layout.schedule.placement.stages_of(0)
    numel = count_held(config.model, [layout.stage_layers[s] for s in stages], layout.tp)
    assert numel % 4 == 0, "no padding"
    own = (found.parameters, found.gradients, found.optimizer, found.transient, found.offloaded)
    return own, numel


@pytest.mark.parametrize(
    ("keys", "per_parameter"),
    [
        (("optimizer.zero=0",), (4, 4, 8, 0, 0)),
        (("optimizer.zero=1",), (4, 4, 2, 1, 0)),
        (("optimizer.zero=1", "model.dtype=bf16"), (2, 4, 3, 1, 0)),
        (("optimizer.zero=1", "model.dtype=fp64"), (8, 8, 4, 2, 0)),
        (("optimizer.post_validation=true", "model.dtype=bf16"), (2, 4, 3, 4, 0)),
        (("optimizer.post_validation=true",), (4, 4, 2, 4, 0)),
        (("optimizer.shard_group_size=2", "model.dtype=bf16"), (2, 4, 6, 2, 0)),
        (("optimizer.rule=lion", "model.dtype=bf16"), (2, 4, 2, 1, 0)),
        (("optimizer.rule=adam",), (4, 4, 2, 1, 0)),
        (("optimizer.rule=sgd",), (4, 4, 1, 1, 0)),
        (("optimizer.rule=muon",), (4, 4, 2, 1, 0)),
        (("optimizer.rule=lars",), (4, 4, 1, 1, 0)),
        (("optimizer.rule=lamb",), (4, 4, 2, 1, 0)),
        (("optimizer.rule=rmsprop",), (4, 4, 2, 1, 0)),
        (("optimizer.rule=rmsprop", "optimizer.options.momentum=0"), (4, 4, 1, 1, 0)),
        (("optimizer.rule=nadamw",), (4, 4, 2, 1, 0)),
        (("optimizer.rule=adabelief",), (4, 4, 2, 1, 0)),
        (("optimizer.rule=adam3",), (4, 4, 2, 1, 0)),
        (("optimizer.weight_prediction=1",), (4, 4, 3, 1, 0)),
        (("optimizer.weight_prediction=1", "model.dtype=bf16"), (2, 4, 3, 1, 0)),
        (("optimizer.rule=tests.parity.user_code_samples:Three",), (4, 4, 3, 1, 0)),
        (
            ("optimizer.rule=tests.parity.user_code_samples:OnlyStep", "model.dtype=bf16"),
            (2, 4, 1, 1, 0),
        ),
        (("model.dtype=bf16", "optimizer.state_dtype=bf16"), (2, 4, 2, 1, 0)),
        (("model.dtype=bf16", "optimizer.master_weights=none"), (2, 4, 2, 1, 0)),
        (("model.dtype=bf16", "optimizer.offload=host"), (2, 4, 0, 1, 3)),
        (
            (
                "optimizer.rule=sgd",
                "optimizer.options.momentum=0",
                "optimizer.options.nesterov=false",
            ),
            (4, 4, 0, 1, 0),
        ),
    ],
    ids=str,
)
def test_bytes_per_parameter(keys: tuple[str, ...], per_parameter: tuple[float, ...]) -> None:
    """Each of four replicas of a stage has all, or a quarter (half, in groups of two) of it."""
    found, numel = memory(*keys)
    assert found == tuple(each * numel for each in per_parameter)


def test_zero_2_and_3_hold_the_gradients_and_weights_of_a_stage_for_a_while() -> None:
    """All of it here: there is one stage. Its slice comes when its gradients go."""
    norms = 4 * 4 * 64 + 2 * 64
    found, numel = memory("optimizer.zero=2", "model.dtype=bf16")
    assert found == (2 * numel, 4 * norms, 3 * numel, 4 * numel, 0)
    found, numel = memory("optimizer.zero=3", "model.dtype=bf16")
    assert found == (numel // 2, 4 * norms, 3 * numel, (2 + 4) * numel, 0)


@pytest.mark.parametrize("prefetch", [0, 1, 3, 9])
def test_zero_3_holds_the_stages_that_are_there_at_a_time(prefetch: int) -> None:
    """From the backward of stage k until that of k - 1 begins, there are the gradients of k and k +
    1, slices of the later ones, and the weights of k, then k - 1, and of `prefetch` stages before
    it."""
    keys = ("pipeline.chunks=4", "pipeline.schedule=breadth_first", "model.layers=8")
    zero = ("optimizer.zero=3", f"optimizer.weight_prefetch={prefetch}")
    config, layout = resolve(parse([*SMALL, *keys, *zero]).config, None, None)
    n = [count_held(config.model, [spec], 1) for spec in layout.stage_layers]

    def weights(k: int) -> int:
        return 4 * sum(n[max(0, k - prefetch) : k + 1])

    most = max(
        max(weights(k), weights(max(k - 1, 0))) + 4 * sum(n[k : k + 2]) + sum(n[k + 2 :])
        for k in range(4)
    )
    assert model_memory(config, layout, 0).transient == most
