"""A plain single-process GPT and its training: what every layout has to reproduce.

Pure functions on a dict of full tensors, written for the reader and not for speed; they share no
code with the package. Batch first; weights are [out, in]; the model's sizes must be resolved.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from megapipe.config.lora import LoraConfig
from megapipe.config.model import ModelConfig
from tests.parity.compare import assert_error_like as assert_error_like
from tests.parity.compare import assert_grads_close as assert_grads_close
from tests.parity.compare import assert_weights_close as assert_weights_close
from tests.parity.compare import gradient_scales as gradient_scales
from tests.parity.mixture import Told, Wire, has_experts, kept, mixture, moved
from tests.parity.mixture import shapes as mixture_shapes
from tests.parity.reference_positions import rotate, slope
from tests.parity.user_norm import mean_size

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor, Tensor]
"""tokens [b, s], labels [b, s] and mask [b, s] (0 or false: not in the loss) of a global batch."""
Noise = Mapping[tuple[str, int], Tensor]
"""Dropout factors, 0 or 1 / (1 - p), by place and layer. "attention": [b, heads, s, s], for
probabilities; "embedding", "attention_out" and "mlp_out": [b, s, h]. For routing: factors "jitter",
[b, s, h], and "second", numbers between 0 and 1, [b, s]."""

ADAPTER_SCALE = 1.5
"""alpha / rank of all adapters."""
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
    told: Told


def shapes(model: ModelConfig, lora: LoraConfig | None = None) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the model, followed by its adapters."""
    h, f, v = model.hidden, model.ffn_hidden, model.vocab_size
    attended = model.heads * model.head_dim
    qkv = attended + 2 * model.kv_heads * model.head_dim
    gated = model.activation in ("swiglu", "geglu_tanh")
    out: dict[str, tuple[int, ...]] = {}

    def norm(name: str) -> None:
        out[f"{name}.weight"] = (h,)
        if model.norm != "rmsnorm" and model.bias:
            out[f"{name}.bias"] = (h,)

    def linear(name: str, *shape: int, bias: bool | None = None) -> None:
        out[f"{name}.weight"] = shape
        if model.bias if bias is None else bias:
            out[f"{name}.bias"] = shape[:-1]

    out["embedding.word.weight"] = (v, h)
    if model.positions == "learned":
        out["embedding.position.weight"] = (model.max_positions, h)
    if model.embedding_norm:
        norm("embedding.norm")
    for i in range(model.layers):
        norm(f"layers.{i}.attention_norm")
        linear(f"layers.{i}.attention.qkv", qkv, h, bias=model.qkv_bias)
        for part in ("q", "k") if model.qk_norm else ():
            out[f"layers.{i}.attention.{part}_norm.weight"] = (model.head_dim,)
        linear(f"layers.{i}.attention.out", h, attended)
        if model.post_norms:
            norm(f"layers.{i}.attention_post_norm")
            norm(f"layers.{i}.mlp_post_norm")
        norm(f"layers.{i}.mlp_norm")
        if has_experts(model, i):
            out |= mixture_shapes(model, i)
        else:
            linear(f"layers.{i}.mlp.up", *((2, f, h) if gated else (f, h)))
            linear(f"layers.{i}.mlp.down", h, f)
    norm("final_norm")
    if not model.tied_embeddings:
        out["head.weight"] = (v, h)
    if lora is not None and lora.rank is not None:
        shared = model.moe.shared_ffn_hidden
        sizes = {  # outputs and inputs
            "attention.qkv": (qkv, h),
            "attention.q": (attended, h),
            "attention.k": (model.kv_heads * model.head_dim, h),
            "attention.v": (model.kv_heads * model.head_dim, h),
            "attention.out": (h, attended),
            "mlp.gate": (f, h),
            "mlp.up": (f, h),
            "mlp.down": (h, f),
        }
        beside = {  # of the shared expert
            "mlp.gate": (shared, h),
            "mlp.up": (shared, h),
            "mlp.down": (h, shared),
        }
        for i in range(model.layers):
            for target in lora.targets:
                (outputs, inputs), name = sizes[target], target
                if target in beside and has_experts(model, i):
                    if shared is None:
                        continue
                    outputs, inputs = beside[target]
                    name = f"moe.shared.{target.removeprefix('mlp.')}"
                out[f"layers.{i}.{name}.lora_a"] = (lora.rank, inputs)
                out[f"layers.{i}.{name}.lora_b"] = (outputs, lora.rank)
    return out


def trained(names: Iterable[str]) -> list[str]:
    """Return the names of adapters if there are any, else all names except router state."""
    names = [name for name in names if not kept(name)]
    return [name for name in names if ".lora_" in name] or names


def as_computed(params: Mapping[str, Tensor], dtype: str) -> Params:
    """Return weights in the type that a model of `dtype` computes with, and router state in the
    masters' type."""
    compute, master = COMPUTE_DTYPES[dtype], MASTER_DTYPES[dtype]
    return {name: p.to(master if kept(name) else compute) for name, p in params.items()}


def init_random(
    model: ModelConfig,
    seed: int,
    dtype: torch.dtype = torch.float64,
    lora: LoraConfig | None = None,
) -> Params:
    """Return random tensors under which no gradient vanishes by accident: norm weights about 1,
    biases not 0, matrices large enough for uneven attention. Drawn in fp64, then cast to
    `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for name, shape in shapes(model, lora).items():
        draw = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("counts"):
            tensor = torch.ones_like(draw)  # choices are spread evenly at first
        elif name.endswith(".bias"):
            tensor = 0.1 * draw
        elif len(shape) == 1:
            tensor = (0 if model.zero_centered_norm else 1) + 0.1 * draw
        elif name.startswith("embedding."):
            tensor = 0.5 * draw
        else:
            tensor = draw / math.sqrt(shape[-1])
        params[name] = tensor.to(dtype)
    return params


def random_batch(model: ModelConfig, b: int, s: int, seed: int, masked: float = 0.0) -> Batch:
    """Draw tokens, labels and mask of shape [b, s]; about a share `masked` is masked out."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (b, s), generator=generator)
    labels = torch.randint(model.vocab_size, (b, s), generator=generator)
    mask = torch.rand((b, s), generator=generator) >= masked
    return tokens, labels, mask


def positions_of(tokens: Tensor) -> Tensor:
    """Return positions [1 or b, s] of the tokens [b, s] within their samples."""
    return torch.arange(tokens.shape[1]).unsqueeze(0)


def logits(
    params: Mapping[str, Tensor],
    model: ModelConfig,
    tokens: Tensor,
    end: int | None = None,
    noise: Noise | None = None,
    told: Told | None = None,
) -> Tensor:
    """Return logits [b, s, V] in the dtype of `params`.

    With `end`, the token that ends a document, tokens do not see earlier documents. `told` records
    the routing of MoE layers.
    """
    told = Told(len(tokens)) if told is None else told
    hidden = _hidden_from(tokens, end)
    x = params["embedding.word.weight"][tokens]  # [b, s, h]
    if model.embedding_scale is not None:
        x = x * torch.tensor(model.embedding_scale, dtype=x.dtype)
    if model.positions == "learned":
        x = x + params["embedding.position.weight"][positions_of(tokens)]
    if model.embedding_norm:
        x = _norm(x, params, "embedding.norm", model)
    x = _drop(x, noise, "embedding", 0)
    for i in range(model.layers):
        normed = _norm(x, params, f"layers.{i}.attention_norm", model)
        y = _drop(_attention(normed, params, i, model, hidden, noise), noise, "attention_out", i)
        if model.post_norms:
            y = _norm(y, params, f"layers.{i}.attention_post_norm", model)
        normed = _norm(
            x if model.parallel_residual else x + y, params, f"layers.{i}.mlp_norm", model
        )
        if has_experts(model, i):
            mlp = functools.partial(_mlp, model=model)
            z = mixture(normed, params, f"layers.{i}.moe", model, mlp, told, _of_routing(noise, i))
        else:
            z = _mlp(normed, params, f"layers.{i}.mlp", model)
        z = _drop(z, noise, "mlp_out", i)
        if model.post_norms:
            z = _norm(z, params, f"layers.{i}.mlp_post_norm", model)
        x = x + y + z
    x = _norm(x, params, "final_norm", model)
    head = "embedding.word" if model.tied_embeddings else "head"
    return _cap(_linear(x, params, head), model.logit_softcap)


def _of_routing(noise: Noise | None, layer: int) -> tuple[Tensor, Tensor] | None:
    """Return a layer's jitter, and the numbers for its second choices."""
    if noise is None or ("jitter", layer) not in noise:
        return None
    return noise["jitter", layer], noise["second", layer]


def _cap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def token_losses(
    params: Mapping[str, Tensor],
    model: ModelConfig,
    tokens: Tensor,
    labels: Tensor,
    end: int | None = None,
    noise: Noise | None = None,
    told: Told | None = None,
) -> Tensor:
    """Return the cross-entropy of every token, [b, s]; bf16 and fp16 logits are computed in
    fp32."""
    out = logits(params, model, tokens, end, noise, told)
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
    noise: Noise | None = None,
    told: Told | None = None,
) -> Tensor:
    """Return the sum of the unmasked token losses / number of unmasked tokens; 0 if there are
    none."""
    losses = token_losses(params, model, tokens, labels, end, noise, told)
    kept = mask.to(losses.dtype)
    return (losses * kept).sum() / kept.sum().clamp(min=1)


def loss_and_grads(
    params: Mapping[str, Tensor],
    model: ModelConfig,
    batch: Batch,
    end: int | None = None,
    *,
    noise: Noise | None = None,
    scale: float = 1.0,
    told: Told | None = None,
) -> tuple[float, Params]:
    """Return loss and gradients of what is trained, computed in `model.dtype` and returned in its
    main-gradient dtype.

    The loss is multiplied by `scale` for the backward, and the gradients are divided by it. Terms
    of MoE layers are in the gradients alone; `told` has the samples of a micro-batch, by default
    all.
    """
    told = Told(len(batch[0])) if told is None else told
    master = MASTER_DTYPES[model.dtype]
    given = as_computed({name: p.detach() for name, p in params.items()}, model.dtype)
    leaves = {name: given[name].requires_grad_() for name in trained(given)}
    value = loss(given, model, *batch, end, noise, told)
    objective = sum(told.terms, value)
    grads = torch.autograd.grad(objective * scale, list(leaves.values()))
    return value.item(), {n: g.to(master) / scale for n, g in zip(leaves, grads, strict=True)}


def train(
    params: Mapping[str, Tensor],
    model: ModelConfig,
    batches: Sequence[Batch],
    optimizer: Settings,
    end: int | None = None,
    rows: int | None = None,
    wire: Wire | None = None,
) -> list[Step]:
    """Take one AdamW step per global batch on master weights (fp32, for an fp64 model fp64). `rows`
    are the samples of a micro-batch, by default all; rows of experts go through `wire`."""
    assert len(optimizer.lr) == len(batches), "one learning rate per step"
    assert model.dropout == model.moe.jitter == 0, "noise differs from step to step"
    dtype = MASTER_DTYPES[model.dtype]
    masters = {n: torch.nn.Parameter(p.detach().to(dtype, copy=True)) for n, p in params.items()}
    learning = {n: masters[n] for n in trained(masters)}
    decayed = [p for n, p in learning.items() if p.ndim >= 2 and not n.endswith(".bias")]
    others = [p for n, p in learning.items() if p.ndim < 2 or n.endswith(".bias")]
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
        told = Told(rows or len(batch[0]), wire=wire or Wire())
        value, grads = loss_and_grads(masters, model, batch, end, told=told)
        for name, parameter in learning.items():
            parameter.grad = grads[name].clone()
        largest = math.inf if optimizer.clip is None else optimizer.clip
        norm = torch.nn.utils.clip_grad_norm_(learning.values(), largest, foreach=False)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        for name, values in moved(masters, model, told.counts, told.counted).items():
            masters[name].data = values.detach()
        after = {name: p.detach().clone() for name, p in masters.items()}
        steps.append(Step(value, grads, norm.item(), after, told))
    return steps


def _norm(x: Tensor, params: Mapping[str, Tensor], name: str, model: ModelConfig) -> Tensor:
    weight = params[f"{name}.weight"]
    if model.norm == "rmsnorm":
        return _rms(x, weight, model)
    if model.own_norm:
        return mean_size(x, weight, params.get(f"{name}.bias"), model.norm_eps)
    return F.layer_norm(x, weight.shape, weight, params.get(f"{name}.bias"), model.norm_eps)


def _rms(x: Tensor, weight: Tensor, model: ModelConfig) -> Tensor:
    if model.zero_centered_norm:  # 1 + weight would lose bits in a narrow type
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, weight.shape, 1 + weight.to(wide.dtype), model.norm_eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, model.norm_eps)


def _head_norm(x: Tensor, params: Mapping[str, Tensor], name: str, model: ModelConfig) -> Tensor:
    return _rms(x, params[f"{name}.weight"], model)


def _half(x: Tensor, params: Mapping[str, Tensor], name: str, half: int) -> Tensor:
    """Return one of the two products of a matrix [2, out, in]."""
    bias = params.get(f"{name}.bias")
    return F.linear(x, params[f"{name}.weight"][half], None if bias is None else bias[half])


def _linear(x: Tensor, params: Mapping[str, Tensor], name: str) -> Tensor:
    y = F.linear(x, params[f"{name}.weight"], params.get(f"{name}.bias"))
    return y + _adapter(x, params, name)


def _adapter(x: Tensor, params: Mapping[str, Tensor], name: str) -> Tensor:
    """Return what an adapter adds, if there is one of that name; else 0."""
    a, b = (params.get(f"{name}.lora_{matrix}") for matrix in "ab")
    if a is None or b is None:
        return x.new_zeros(())
    return ADAPTER_SCALE * F.linear(x, a) @ b.T


def _hidden_from(tokens: Tensor, end: int | None) -> Tensor:
    """Return [b, s, s]: true where a position must not see another: a later one, or one before an
    end of a document."""
    b, s = tokens.shape
    hidden = torch.zeros(b, s, s, dtype=torch.bool)
    for row in range(b):
        for i in range(s):
            for j in range(s):
                hidden[row, i, j] = j > i or end in tokens[row, j:i].tolist()
    return hidden


def _drop(x: Tensor, noise: Noise | None, place: str, layer: int) -> Tensor:
    given = None if noise is None else noise.get((place, layer))
    return x if given is None else x * given.to(x.dtype)


def _attention(
    x: Tensor,
    params: Mapping[str, Tensor],
    layer: int,
    model: ModelConfig,
    hidden: Tensor,
    noise: Noise | None,
) -> Tensor:
    d, name = model.head_dim, f"layers.{layer}.attention"
    per_group = model.heads // model.kv_heads
    qkv = _linear(x, params, f"{name}.qkv")  # [b, s, kv_heads x (per_group + 2) x d]
    queries, keys, values = [], [], []
    for number, group in enumerate(qkv.split((per_group + 2) * d, dim=-1)):
        *q, k, v = group.split(d, dim=-1)  # each [b, s, d]
        of_k, of_v = (_adapter_of_head(x, params, f"{name}.{part}", number, d) for part in "kv")
        for each in q:
            queries.append(each + _adapter_of_head(x, params, f"{name}.q", len(queries), d))
        keys += [k + of_k] * per_group
        values += [v + of_v] * per_group
    heads, window, s = [], _window(model, layer), x.shape[1]
    if window is not None:
        hidden = hidden | torch.ones(s, s, dtype=torch.bool).tril(-window)
    for head, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        if model.qk_norm:
            q = _head_norm(q, params, f"{name}.q_norm", model)
            k = _head_norm(k, params, f"{name}.k_norm", model)
        if model.positions == "rotary":
            rope = model.rope
            if window is not None and rope.local_base is not None:
                rope = rope.model_copy(update={"base": rope.local_base, "scaling": "none"})
            q, k = rotate(q, rope), rotate(k, rope)
        scores = q @ k.transpose(-1, -2)  # [b, s, s]
        scores = (
            scores / math.sqrt(d)
            if model.attention_scale is None
            else scores * model.attention_scale
        )
        scores = _cap(scores, model.attention_softcap)
        if model.positions == "alibi":
            place = torch.arange(s, dtype=x.dtype)
            scores = scores - slope(head, model.heads) * (place[:, None] - place)
        shares = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        if noise is not None and ("attention", layer) in noise:
            shares = shares * noise["attention", layer][:, head].to(x.dtype)
        heads.append(shares @ v)
    return _linear(torch.cat(heads, dim=-1), params, f"{name}.out")


def _adapter_of_head(
    x: Tensor, params: Mapping[str, Tensor], name: str, head: int, d: int
) -> Tensor:
    """Return what an adapter of queries, keys or values adds to a head: [b, s, d], or 0."""
    added = _adapter(x, params, name)
    return added[..., head * d : (head + 1) * d] if added.ndim else added


def _window(model: ModelConfig, layer: int) -> int | None:
    """Return the number of positions that a token of a layer sees."""
    every = model.full_attention_every
    return None if every is not None and layer % every == every - 1 else model.sliding_window


def _mlp(x: Tensor, params: Mapping[str, Tensor], name: str, model: ModelConfig) -> Tensor:
    if model.activation in ("swiglu", "geglu_tanh"):
        gate = _half(x, params, f"{name}.up", 0) + _adapter(x, params, f"{name}.gate")
        gate = F.silu(gate) if model.activation == "swiglu" else F.gelu(gate, approximate="tanh")
        inner = gate * (_half(x, params, f"{name}.up", 1) + _adapter(x, params, f"{name}.up"))
    else:
        tanh = "tanh" if model.activation == "gelu_tanh" else "none"
        inner = F.gelu(_linear(x, params, f"{name}.up"), approximate=tanh)
    return _linear(inner, params, f"{name}.down")
