"""A plain single-process GPT and its training: what every layout has to reproduce.

Pure functions on a dict of full tensors, written for the reader and not for speed, and sharing no
code with the package. Batch first; weights are [out, in]; the model's sizes must be resolved.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from megapipe.model.config import ModelConfig

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor, Tensor]
"""tokens [b, s], labels [b, s] and mask [b, s] (0 or false: not in the loss) of a global batch."""

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
MASTER_DTYPES = dict.fromkeys(("fp32", "bf16", "fp16"), torch.float32) | {"fp64": torch.float64}


class Settings(Protocol):
    """AdamW's settings: `Optimizer`, or any namespace with the same names."""

    lr: Sequence[float]
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float | None


@dataclass
class Optimizer:
    """AdamW's settings; `lr` has one entry per step."""

    lr: Sequence[float]
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0


@dataclass
class Step:
    """What one step computed: gradients before clipping, weights after the update."""

    loss: float
    grads: Params
    grad_norm: float
    params: Params


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model."""
    h, f, v = model.hidden, model.ffn_hidden, model.vocab_size
    attended = model.heads * model.head_dim
    qkv = attended + 2 * model.kv_heads * model.head_dim
    swiglu = model.activation == "swiglu"
    out: dict[str, tuple[int, ...]] = {}

    def norm(name: str) -> None:
        out[f"{name}.weight"] = (h,)
        if model.norm == "layernorm" and model.bias:
            out[f"{name}.bias"] = (h,)

    def linear(name: str, *shape: int) -> None:
        out[f"{name}.weight"] = shape
        if model.bias:
            out[f"{name}.bias"] = shape[:-1]

    out["embedding.word.weight"] = (v, h)
    if model.positions == "learned":
        out["embedding.position.weight"] = (model.max_positions, h)
    for i in range(model.layers):
        norm(f"layers.{i}.attention_norm")
        linear(f"layers.{i}.attention.qkv", qkv, h)
        linear(f"layers.{i}.attention.out", h, attended)
        norm(f"layers.{i}.mlp_norm")
        linear(f"layers.{i}.mlp.up", *((2, f, h) if swiglu else (f, h)))
        linear(f"layers.{i}.mlp.down", h, f)
    norm("final_norm")
    if not model.tied_embeddings:
        out["head.weight"] = (v, h)
    return out


def init_random(model: ModelConfig, seed: int, dtype: torch.dtype = torch.float64) -> Params:
    """Random tensors under which no gradient vanishes by accident: norm weights about 1, biases
    not 0, matrices large enough for uneven attention. Drawn in fp64, then cast to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for name, shape in shapes(model).items():
        draw = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith(".bias"):
            tensor = 0.1 * draw
        elif len(shape) == 1:
            tensor = 1 + 0.1 * draw
        elif name.startswith("embedding."):
            tensor = 0.5 * draw
        else:
            tensor = draw / math.sqrt(shape[-1])
        params[name] = tensor.to(dtype)
    return params


def random_batch(model: ModelConfig, b: int, s: int, seed: int, masked: float = 0.0) -> Batch:
    """Random tokens, labels and mask of shape [b, s]; about a share `masked` is masked out."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (b, s), generator=generator)
    labels = torch.randint(model.vocab_size, (b, s), generator=generator)
    mask = torch.rand((b, s), generator=generator) >= masked
    return tokens, labels, mask


def logits(
    params: Mapping[str, Tensor], model: ModelConfig, tokens: Tensor, end: int | None = None
) -> Tensor:
    """Logits [b, s, V] in the dtype of `params`.

    With `end`, the token that ends a document, nothing is seen of earlier documents.
    """
    assert model.dropout == 0, "the reference has no dropout"
    hidden = _hidden_from(tokens, end)
    x = params["embedding.word.weight"][tokens]  # [b, s, h]
    if model.positions == "learned":
        x = x + params["embedding.position.weight"][: tokens.shape[1]]
    for i in range(model.layers):
        normed = _norm(x, params, f"layers.{i}.attention_norm", model)
        x = x + _attention(normed, params, f"layers.{i}.attention", model, hidden)
        normed = _norm(x, params, f"layers.{i}.mlp_norm", model)
        x = x + _mlp(normed, params, f"layers.{i}.mlp", model)
    x = _norm(x, params, "final_norm", model)
    head = "embedding.word.weight" if model.tied_embeddings else "head.weight"
    return x @ params[head].T


def token_losses(
    params: Mapping[str, Tensor],
    model: ModelConfig,
    tokens: Tensor,
    labels: Tensor,
    end: int | None = None,
) -> Tensor:
    """Cross-entropy of every token, [b, s]; of bf16 and fp16 logits in fp32."""
    out = logits(params, model, tokens, end)
    if out.dtype in (torch.bfloat16, torch.float16):
        out = out.float()
    return -F.log_softmax(out, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def loss(
    params: Mapping[str, Tensor],
    model: ModelConfig,
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor,
    end: int | None = None,
) -> Tensor:
    """Sum of the unmasked token losses / number of unmasked tokens; 0 if there are none."""
    losses = token_losses(params, model, tokens, labels, end)
    kept = mask.to(losses.dtype)
    return (losses * kept).sum() / kept.sum().clamp(min=1)


def loss_and_grads(
    params: Mapping[str, Tensor], model: ModelConfig, batch: Batch, end: int | None = None
) -> tuple[float, Params]:
    """Loss and gradients, computed in `model.dtype` and returned in its main-gradient dtype."""
    compute, master = COMPUTE_DTYPES[model.dtype], MASTER_DTYPES[model.dtype]
    leaves = {name: p.detach().to(compute).requires_grad_() for name, p in params.items()}
    value = loss(leaves, model, *batch, end)
    grads = torch.autograd.grad(value, list(leaves.values()))
    return value.item(), {name: g.to(master) for name, g in zip(leaves, grads, strict=True)}


def train(
    params: Mapping[str, Tensor],
    model: ModelConfig,
    batches: Sequence[Batch],
    optimizer: Settings,
    end: int | None = None,
) -> list[Step]:
    """One AdamW step per global batch on master weights (fp32, for an fp64 model fp64)."""
    assert len(optimizer.lr) == len(batches), "one learning rate per step"
    dtype = MASTER_DTYPES[model.dtype]
    masters = {n: torch.nn.Parameter(p.detach().to(dtype, copy=True)) for n, p in params.items()}
    decayed = [p for n, p in masters.items() if p.ndim >= 2 and not n.endswith(".bias")]
    others = [p for n, p in masters.items() if p.ndim < 2 or n.endswith(".bias")]
    adamw = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": optimizer.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        foreach=False,
    )
    steps = []
    for batch, lr in zip(batches, optimizer.lr, strict=True):
        value, grads = loss_and_grads(masters, model, batch, end)
        for name, parameter in masters.items():
            parameter.grad = grads[name].clone()
        largest = math.inf if optimizer.clip is None else optimizer.clip
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), largest, foreach=False)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        after = {name: p.detach().clone() for name, p in masters.items()}
        steps.append(Step(value, grads, norm.item(), after))
    return steps


def assert_grads_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-10
) -> None:
    """Per tensor max|a - b| <= tolerance x max(max|b| of the tensor, 1e-3 x max|b| over all).

    The second term is for gradients that are zero but for rounding, such as a key bias's.
    """
    floor = 1e-3 * max(_largest(g) for g in expected.values())
    scales = {name: max(_largest(g), floor) for name, g in expected.items()}
    _assert_close("gradient", actual, expected, scales, tolerance)


def assert_weights_close(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    lr: float,
    tolerance: float = 1e-10,
) -> None:
    """Per tensor max|a - b| <= tolerance x max(max|b| of the tensor, lr)."""
    scales = {name: max(_largest(w), lr) for name, w in expected.items()}
    _assert_close("weight", actual, expected, scales, tolerance)


def assert_error_like(
    actual: Mapping[str, Tensor],
    baseline: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    factor: float = 2.0,
) -> None:
    """`actual` is at most `factor` times as far from `expected` as `baseline` is: for bf16.

    Distances are root-mean-square ones per tensor; a baseline counts as at least 1e-3 x the
    rounding (2**-8) of the largest value over all, as for the gradients in `assert_grads_close`.
    """
    _assert_same_tensors(actual, expected)
    _assert_same_tensors(baseline, expected)
    floor = 1e-3 * 2**-8 * max(_largest(t) for t in expected.values())
    ratios = {}
    for name, reference in expected.items():
        least = floor * math.sqrt(reference.numel())
        allowed = max(_distance(baseline[name], reference), least)
        ratios[name] = _ratio(_distance(actual[name], reference), allowed)
    name, worst = _worst(ratios)
    assert worst <= factor, f"{name}: error is {worst:.3g} x the baseline's, above {factor:.3g}"


def _norm(x: Tensor, params: Mapping[str, Tensor], name: str, model: ModelConfig) -> Tensor:
    weight = params[f"{name}.weight"]
    if model.norm == "rmsnorm":
        return F.rms_norm(x, weight.shape, weight, model.norm_eps)
    return F.layer_norm(x, weight.shape, weight, params.get(f"{name}.bias"), model.norm_eps)


def _linear(x: Tensor, params: Mapping[str, Tensor], name: str) -> Tensor:
    return F.linear(x, params[f"{name}.weight"], params.get(f"{name}.bias"))


def _hidden_from(tokens: Tensor, end: int | None) -> Tensor:
    """[b, s, s]: true where a position must not see another: a later one, or one that an end of
    a document separates it from."""
    b, s = tokens.shape
    hidden = torch.zeros(b, s, s, dtype=torch.bool)
    for row in range(b):
        for i in range(s):
            for j in range(s):
                hidden[row, i, j] = j > i or end in tokens[row, j:i].tolist()
    return hidden


def _attention(
    x: Tensor, params: Mapping[str, Tensor], name: str, model: ModelConfig, hidden: Tensor
) -> Tensor:
    d = model.head_dim
    per_group = model.heads // model.kv_heads
    qkv = _linear(x, params, f"{name}.qkv")  # [b, s, kv_heads x (per_group + 2) x d]
    queries, keys, values = [], [], []
    for group in qkv.split((per_group + 2) * d, dim=-1):
        *q, k, v = group.split(d, dim=-1)  # each [b, s, d]
        queries += q
        keys += [k] * per_group
        values += [v] * per_group
    heads = []
    for q, k, v in zip(queries, keys, values, strict=True):
        if model.positions == "rotary":
            q, k = _rotate(q, model), _rotate(k, model)
        scores = q @ k.transpose(-1, -2) / math.sqrt(d)  # [b, s, s]
        heads.append(scores.masked_fill(hidden, -math.inf).softmax(dim=-1) @ v)
    return _linear(torch.cat(heads, dim=-1), params, f"{name}.out")


def _rotate(x: Tensor, model: ModelConfig) -> Tensor:
    """Rotary embedding (Su et al., 2104.09864) of x [b, s, d]: pair (j, j + d/2) is turned by
    position x base**(-2j/d)."""
    s, d = x.shape[1:]
    frequency = model.rotary_base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.arange(s, dtype=torch.float64)[:, None] * frequency  # [s, d/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _mlp(x: Tensor, params: Mapping[str, Tensor], name: str, model: ModelConfig) -> Tensor:
    if model.activation == "swiglu":
        weight, bias = params[f"{name}.up.weight"], params.get(f"{name}.up.bias", (None, None))
        inner = F.silu(F.linear(x, weight[0], bias[0])) * F.linear(x, weight[1], bias[1])
    else:
        tanh = "tanh" if model.activation == "gelu_tanh" else "none"
        inner = F.gelu(_linear(x, params, f"{name}.up"), approximate=tanh)
    return _linear(inner, params, f"{name}.down")


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def _distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).norm().item()


def _ratio(difference: float, scale: float) -> float:
    """difference / scale, with anything that is not a finite number as infinite."""
    if difference == 0:
        return 0.0
    ratio = difference / scale if scale else math.inf
    return math.inf if math.isnan(ratio) else ratio


def _worst(ratios: Mapping[str, float]) -> tuple[str, float]:
    return max(ratios.items(), key=lambda item: item[1])


def _assert_same_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    differing = sorted(actual.keys() ^ expected.keys())
    assert not differing, f"tensors in only one of the two: {differing}"
    for name, tensor in expected.items():
        found = tuple(actual[name].shape)
        assert found == tuple(tensor.shape), f"{name}: shape {found}, not {tuple(tensor.shape)}"


def _assert_close(
    what: str,
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    scales: Mapping[str, float],
    tolerance: float,
) -> None:
    _assert_same_tensors(actual, expected)
    ratios = {
        name: _ratio(_largest(actual[name].double() - reference.double()), scales[name])
        for name, reference in expected.items()
    }
    name, worst = _worst(ratios)
    assert worst <= tolerance, (
        f"{what} {name}: largest difference is {worst:.3g} x its scale {scales[name]:.3g}, "
        f"above {tolerance:.3g}"
    )
