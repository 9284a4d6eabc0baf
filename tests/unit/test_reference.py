"""The reference's training loop against hand-computed steps, and its comparisons' teeth."""

import math

import pytest
import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from tests.parity.by_position import grads_by_position
from tests.parity.cases import END, Case, batch_of, configure
from tests.parity.compare import assert_within
from tests.parity.dropout_noise import noise_of
from tests.parity.mixture import Told
from tests.parity.named_settings import MODELS
from tests.parity.reference import (
    Optimizer,
    Params,
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
    """Add the gradients of a full batch's single rows in fp32."""
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


def test_bounds_of_single_values_name_the_worst() -> None:
    expected = {"a": torch.tensor([1.0, 2.0]).double(), "b": torch.zeros(2).double()}
    allowed = {"a": torch.tensor([1e-3, 0.1]).double(), "b": torch.full((2,), 1e-3).double()}
    assert_within("state", {**expected, "a": expected["a"] + 0.9e-3}, expected, allowed)
    message = r"state a: 1 of 2 values are wrong; the largest difference is 0\.05, and 0\.001"
    with pytest.raises(AssertionError, match=message):
        assert_within("state", {**expected, "a": expected["a"] + 0.05}, expected, allowed)
    with pytest.raises(AssertionError, match="state b: 2 of 2"):
        assert_within("state", {**expected, "b": expected["b"] * math.nan}, expected, allowed)


def test_errors_of_one_kind_are_taken_together_and_hide_none() -> None:
    torch.manual_seed(0)
    expected = {f"{i}.x": torch.randn(16).double() * 10**i for i in range(4)}
    baseline = {name: t * (1 + 0.01 * torch.randn(16)) for name, t in expected.items()}
    actual = {name: t * (1 + 0.01 * torch.randn(16)) for name, t in expected.items()}
    unlucky = {**actual, "2.x": expected["2.x"] + 2.5 * (baseline["2.x"] - expected["2.x"])}
    with pytest.raises(AssertionError, match=r"2\.x: error is 2\.5 x"):
        assert_error_like(unlucky, baseline, expected)
    assert_error_like(unlucky, baseline, expected, kind=lambda name: name[-1])
    wrong = {**actual, "2.x": 1.1 * expected["2.x"]}
    with pytest.raises(AssertionError, match="x: error is"):
        assert_error_like(wrong, baseline, expected, kind=lambda name: name[-1])
    extra = {name: 0.1 * t.abs() for name, t in expected.items()}
    assert_error_like(wrong, baseline, expected, slack=extra)


def test_a_scale_of_the_loss_keeps_what_fp16_would_lose() -> None:
    fp16 = MODEL.model_copy(update={"dtype": "fp16"})
    params = init_random(MODEL, seed=0)
    batch = random_batch(MODEL, b=4, s=12, seed=1)
    _, exact = loss_and_grads(params, MODEL, batch)
    _, scaled = loss_and_grads(params, fp16, batch, scale=2.0**10)
    _, lost = loss_and_grads(params, fp16, batch, scale=2.0**-12)
    name = "layers.0.mlp.up.weight"
    assert (scaled[name] - exact[name]).norm() < 0.1 * (lost[name] - exact[name]).norm()


def test_dropout_multiplies_where_it_is() -> None:
    params = init_random(MODEL, seed=0)
    tokens, labels, _ = random_batch(MODEL, b=2, s=8, seed=1)
    places = [("embedding", 0), *((p, i) for p in ("attention_out", "mlp_out") for i in (0, 1))]
    noise = {place: torch.ones(2, 8, 16).double() for place in places}
    noise |= {("attention", i): torch.ones(2, 4, 8, 8).double() for i in (0, 1)}
    whole = token_losses(params, MODEL, tokens, labels)
    assert token_losses(params, MODEL, tokens, labels, noise=noise).equal(whole)
    for place, ones in noise.items():
        changed = ones.clone()
        changed[1, 3] = 0  # position 3 or, of attention, head 3
        losses = token_losses(params, MODEL, tokens, labels, noise={**noise, place: changed})
        assert losses[0].equal(whole[0])
        if place[0] == "attention":
            assert (losses[1] != whole[1]).all(), place
        else:
            assert losses[1, :3].equal(whole[1, :3])
            assert losses[1, 3] != whole[1, 3], place


def test_noise_is_a_function_of_coordinates() -> None:
    noise = noise_of(Case(m=4, dropout=0.2, layers=2), step=1)
    assert noise is not None
    assert len(noise) == 1 + 3 * 2
    for (place, _), values in noise.items():
        seen = values.tril() if place == "attention" else values
        assert set(seen.unique().tolist()) == {0.0, 1.25}
    layouts = [Case(dp=2, m=2, pp=2, dropout=0.2, layers=2), Case(m=4, tp=2, dropout=0.2, layers=2)]
    for case in layouts:
        other = noise_of(case, step=1)
        assert other is not None
        assert other["mlp_out", 1].equal(noise["mlp_out", 1])
        assert other["attention", 1].equal(noise["attention", 1]) == (case.tp == 1)
    later = noise_of(Case(m=4, dropout=0.2, layers=2), step=2)
    assert later is not None
    assert not any(later[place].equal(noise[place]) for place in noise)
    assert noise_of(Case(), step=0) is None


@pytest.mark.parametrize(
    ("model", "moe"), [*((model, None) for model in MODELS), ("gpt2", "top 2")]
)
def test_gradients_by_position(model: str, moe: str | None) -> None:
    """They add up to the gradient; a position's embedding has its own from one part."""
    lora = None if model == "gpt2" else "all"
    case = Case(model=model, moe=moe, tied=False, documents=True, lora=lora)
    config, _ = configure(case)
    params = init_random(config.model, seed=3, lora=config.lora)
    parts = [[0, 1, 6, 7], [2, 3, 4, 5]]
    batch = batch_of(case, 0)

    def objective(params: Params) -> Tensor:
        told = Told(len(batch[0]))
        return sum(told.terms, loss(params, config.model, *batch, END, told=told))

    found = grads_by_position(params, parts, objective)
    _, exact = loss_and_grads(params, config.model, batch, END)
    assert_grads_close({name: found[0][name] + found[1][name] for name in exact}, exact, 1e-14)
    for part, grads in zip(parts, found, strict=True):
        assert all(grad.any() for grad in grads.values())
        if model == "gpt2":
            name = "embedding.position.weight"
            assert grads[name][part].equal(exact[name][part])
