"""The reference's training loop against hand-computed steps, and its comparisons' teeth."""

import math

import pytest
import torch
from reference import (
    Optimizer,
    assert_error_like,
    assert_grads_close,
    assert_weights_close,
    init_random,
    loss,
    loss_and_grads,
    random_batch,
    shapes,
    token_losses,
    train,
)
from torch import Tensor

from megapipe.model.config import ModelConfig

MODEL = ModelConfig(
    layers=2, hidden=16, heads=4, kv_heads=2, vocab_size=29, max_positions=12, dtype="fp64"
).resolved(vocab_size=0, sequence_length=0)
SWIGLU = MODEL.model_copy(update={"activation": "swiglu", "ffn_hidden": 24})


def test_shapes() -> None:
    assert shapes(SWIGLU.model_copy(update={"layers": 1, "tied_embeddings": False})) == {
        "embedding.word.weight": (29, 16),
        "embedding.position.weight": (12, 16),
        "layers.0.attention_norm.weight": (16,),
        "layers.0.attention_norm.bias": (16,),
        "layers.0.attention.qkv.weight": (32, 16),
        "layers.0.attention.qkv.bias": (32,),
        "layers.0.attention.out.weight": (16, 16),
        "layers.0.attention.out.bias": (16,),
        "layers.0.mlp_norm.weight": (16,),
        "layers.0.mlp_norm.bias": (16,),
        "layers.0.mlp.up.weight": (2, 24, 16),
        "layers.0.mlp.up.bias": (2, 24),
        "layers.0.mlp.down.weight": (16, 24),
        "layers.0.mlp.down.bias": (16,),
        "final_norm.weight": (16,),
        "final_norm.bias": (16,),
        "head.weight": (29, 16),
    }


def test_no_token_sees_the_future() -> None:
    params = init_random(MODEL, seed=0)
    tokens, labels, _ = random_batch(MODEL, b=1, s=12, seed=1)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 29
    before = token_losses(params, MODEL, tokens, labels)
    after = token_losses(params, MODEL, changed, labels)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).all()


def test_loss_is_the_mean_over_unmasked_tokens() -> None:
    params = init_random(MODEL, seed=0)
    tokens, labels, mask = random_batch(MODEL, b=3, s=8, seed=1, masked=0.4)
    per_token = token_losses(params, MODEL, tokens, labels)
    kept = [per_token[i, j].item() for i in range(3) for j in range(8) if mask[i, j]]
    assert 0 < len(kept) < 24
    assert loss(params, MODEL, tokens, labels, mask).item() == pytest.approx(
        sum(kept) / len(kept), rel=1e-14
    )


def test_nothing_unmasked_gives_zero() -> None:
    params = init_random(MODEL, seed=0)
    tokens, labels, mask = random_batch(MODEL, b=2, s=8, seed=1)
    value, grads = loss_and_grads(params, MODEL, (tokens, labels, torch.zeros_like(mask)))
    assert value == 0
    assert not any(torch.count_nonzero(g) for g in grads.values())


def test_train_is_adamw_with_clipping_and_no_decay_of_vectors() -> None:
    params = init_random(SWIGLU, seed=0)
    batches = [random_batch(SWIGLU, b=2, s=8, seed=i, masked=0.2) for i in range(3)]
    settings = Optimizer(lr=[1e-3, 2e-3, 3e-3], eps=1e-6, weight_decay=0.3, clip=0.05)
    steps = train(params, SWIGLU, batches, settings)
    assert all(step.grad_norm > settings.clip for step in steps)

    weights = dict(params)
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    for t, (step, batch, lr) in enumerate(zip(steps, batches, settings.lr, strict=True), start=1):
        value, grads = loss_and_grads(weights, SWIGLU, batch)
        norm = math.sqrt(sum((g**2).sum().item() for g in grads.values()))
        assert step.loss == pytest.approx(value, rel=1e-12)
        assert step.grad_norm == pytest.approx(norm, rel=1e-12)
        assert_grads_close(step.grads, grads)
        for name, grad in grads.items():
            clipped = grad * settings.clip / (norm + 1e-6)
            first[name] = 0.9 * first[name] + 0.1 * clipped
            second[name] = 0.95 * second[name] + 0.05 * clipped**2
            matrix = name.endswith(".weight") and "norm" not in name
            decay = settings.weight_decay if matrix else 0.0
            scale = (second[name] / (1 - 0.95**t)).sqrt() + settings.eps
            update = first[name] / (1 - 0.9**t) / scale
            weights[name] = weights[name] * (1 - lr * decay) - lr * update
        assert_weights_close(step.params, weights, lr)


def test_train_leaves_its_input_alone_and_no_clip_means_none() -> None:
    params = init_random(MODEL, seed=0)
    copy = {name: p.clone() for name, p in params.items()}
    batches = [random_batch(MODEL, b=2, s=8, seed=1)]
    free = train(params, MODEL, batches, Optimizer(lr=[1e-3], clip=None))[0]
    loose = train(params, MODEL, batches, Optimizer(lr=[1e-3], clip=1e6))[0]
    assert all(torch.equal(params[name], copy[name]) for name in params)
    assert all(torch.equal(free.params[name], loose.params[name]) for name in params)


def test_bf16_keeps_fp32_masters_and_is_near_fp32() -> None:
    bf16 = MODEL.model_copy(update={"dtype": "bf16"})
    fp32 = MODEL.model_copy(update={"dtype": "fp32"})
    params = init_random(MODEL, seed=0, dtype=torch.float32)
    batch = random_batch(MODEL, b=4, s=12, seed=1)
    step = train(params, bf16, [batch], Optimizer(lr=[1e-5]))[0]
    exact = train(params, fp32, [batch], Optimizer(lr=[1e-5]))[0]
    assert {t.dtype for t in (*step.grads.values(), *step.params.values())} == {torch.float32}
    assert 0 < abs(step.loss - exact.loss) < 0.02 * exact.loss
    name = "layers.0.mlp.up.weight"
    error = (step.grads[name] - exact.grads[name]).norm() / exact.grads[name].norm()
    assert 1e-4 < error < 0.05
    assert not torch.equal(step.params[name], params[name])  # finer than bf16 could show


def sum_of_microbatches(params: dict[str, Tensor], model: ModelConfig, batch) -> dict[str, Tensor]:
    """Gradients of a full batch from its single rows, added in fp32."""
    rows = [
        loss_and_grads(params, model, tuple(t[i : i + 1] for t in batch))[1]
        for i in range(len(batch[0]))
    ]
    return {name: sum(row[name] for row in rows) / len(rows) for name in params}


@pytest.mark.parametrize("seed", range(4))
def test_bf16_comparison_accepts_another_order_and_refuses_more_error(seed: int) -> None:
    fp32 = MODEL.model_copy(update={"dtype": "fp32", "tied_embeddings": seed % 2 == 0})
    bf16 = fp32.model_copy(update={"dtype": "bf16"})
    params = init_random(fp32, seed=seed, dtype=torch.float32)
    batch = random_batch(MODEL, b=4, s=12, seed=seed)
    _, exact = loss_and_grads(params, fp32, batch)
    _, baseline = loss_and_grads(params, bf16, batch)
    actual = sum_of_microbatches(params, bf16, batch)
    assert_error_like(actual, baseline, exact)

    worse = dict(actual)
    name = "layers.1.mlp.down.weight"
    worse[name] = actual[name] * 1.1
    with pytest.raises(AssertionError, match=name):
        assert_error_like(worse, baseline, exact)


def test_gradient_comparison_names_the_worst_tensor() -> None:
    expected = {"a": torch.tensor([1.0, -2.0]).double(), "b": torch.tensor([1e-6]).double()}
    assert_grads_close(expected, expected)
    # b's scale is 1e-3 x the largest gradient of all, not its own size
    assert_grads_close({**expected, "b": expected["b"] + 1.9e-13}, expected)
    with pytest.raises(AssertionError, match=r"gradient b: .* 1\.05e-10 x its scale 0\.002"):
        assert_grads_close({**expected, "b": expected["b"] + 2.1e-13}, expected)
    with pytest.raises(AssertionError, match="gradient a"):
        assert_grads_close({**expected, "a": expected["a"] + 2.1e-10}, expected)
    with pytest.raises(AssertionError, match=r"only one of the two: \['b'\]"):
        assert_grads_close({"a": expected["a"]}, expected)
    with pytest.raises(AssertionError, match=r"a: shape \(1, 2\)"):
        assert_grads_close({**expected, "a": expected["a"][None]}, expected)


@pytest.mark.parametrize("where", ["a", "b"])
def test_nan_is_never_close(where: str) -> None:
    expected = {"a": torch.ones(2), "b": torch.ones(3)}
    broken = {name: t * math.nan if name == where else t for name, t in expected.items()}
    with pytest.raises(AssertionError, match=where):
        assert_grads_close(broken, expected)
    with pytest.raises(AssertionError, match=where):
        assert_weights_close(broken, expected, lr=1.0)
    with pytest.raises(AssertionError, match=where):
        assert_error_like(broken, expected, expected)
    with pytest.raises(AssertionError):
        assert_grads_close(expected, broken)


def test_zero_gradients_are_close_only_to_zero() -> None:
    zeros = {"a": torch.zeros(2)}
    assert_grads_close(zeros, zeros)
    with pytest.raises(AssertionError, match="inf x its scale"):
        assert_grads_close({"a": torch.full((2,), 1e-30)}, zeros)


def test_weight_comparison_scales_with_the_learning_rate() -> None:
    expected = {"a": torch.tensor([1e-6]).double()}
    assert_weights_close({"a": expected["a"] + 0.9e-13}, expected, lr=1e-3)
    with pytest.raises(AssertionError, match="weight a"):
        assert_weights_close({"a": expected["a"] + 0.9e-13}, expected, lr=1e-4)
