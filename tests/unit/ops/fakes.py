"""Stand-ins for packages that are not installed: their interfaces, computed by torch.

They compute what the real ones document, in fp32 like these, from formulas written out here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


def install(patch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Install a module `name` with this content, and the packages around it."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path not in sys.modules:
            module = ModuleType(path)
            module.__spec__ = ModuleSpec(path, None, is_package=i < len(parts))
            patch.setitem(sys.modules, path, module)
    for key, value in content.items():
        setattr(sys.modules[name], key, value)


def on_any_device(patch: pytest.MonkeyPatch) -> None:
    """Waive the kernels' need for a GPU: their stand-ins have none."""
    from megapipe.ops import adam, attention_choice, norm, swiglu, weight_grad

    for module in (adam, attention_choice, norm, swiglu, weight_grad):
        patch.setattr(module, "needs_cuda", lambda device: None)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    return y.to(x.dtype)


def layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.float() - x.float().mean(-1, keepdim=True)
    y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (y * weight.float() + bias.float()).to(x.dtype)


def apex_norms(patch: pytest.MonkeyPatch) -> None:
    def fused_layer_norm_affine(
        input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float = 1e-6
    ) -> Tensor:
        assert tuple(normalized_shape) == weight.shape
        return layer(input, weight, bias, eps)

    def fused_rms_norm_affine(
        input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6
    ) -> Tensor:
        assert tuple(normalized_shape) == weight.shape
        return rms(input, weight, eps)

    install(patch, "fused_layer_norm_cuda")
    install(
        patch,
        "apex.normalization.fused_layer_norm",
        fused_layer_norm_affine=fused_layer_norm_affine,
        fused_rms_norm_affine=fused_rms_norm_affine,
    )


class Applied:
    """A function in the form of an autograd function's class."""

    def __init__(self, apply: Callable[..., Tensor]) -> None:
        self.apply = apply


def liger(patch: pytest.MonkeyPatch) -> None:
    def rms_norm(
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
        row_mode: Any = None,
    ) -> Tensor:
        assert casting_mode == "gemma", "llama rounds before the weight is applied, torch after"
        assert not in_place
        return rms(x, weight + offset, eps)

    def swiglu(a: Tensor, b: Tensor) -> Tensor:
        return (a.float() * a.float().sigmoid() * b.float()).to(a.dtype)

    install(patch, "liger_kernel.ops.rms_norm", LigerRMSNormFunction=Applied(rms_norm))
    install(patch, "liger_kernel.ops.layer_norm", LigerLayerNormFunction=Applied(layer))
    install(patch, "liger_kernel.ops.swiglu", LigerSiLUMulFunction=Applied(swiglu))


def apex_weight_grad(patch: pytest.MonkeyPatch) -> None:
    def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
        assert d_weight.dtype == torch.float32
        d_weight += d_output.float().t() @ input.float()

    install(patch, "fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)


def apex_adam(patch: pytest.MonkeyPatch) -> None:
    def multi_tensor_adam(
        chunk_size: int,
        noop_flag: Tensor,
        tensor_lists: list[list[Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        assert noop_flag.dtype == torch.int32
        if noop_flag.item():
            return
        first, second = 1 - beta1**step, 1 - beta2**step
        if not bias_correction:
            first = second = 1.0
        for g, p, m, v in zip(*tensor_lists, strict=True):
            grad = g if mode == 1 else g + weight_decay * p
            m.copy_(beta1 * m + (1 - beta1) * grad)
            v.copy_(beta2 * v + (1 - beta2) * grad * grad)
            update = (m / first) / ((v / second).sqrt() + epsilon)
            if mode == 1:
                update = update + weight_decay * p
            p.copy_(p - lr * update)

    install(patch, "amp_C", multi_tensor_adam=multi_tensor_adam)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    cap: float | None = None,
    slopes: Sequence[float] | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend causally from the last s of t positions: [s, heads, d] from [t, groups, d]."""
    s, t, per_group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(per_group, dim=1) for x in (k, v))
    scores = torch.einsum("shd,thd->hst", q.double(), k.double())
    scores = scores / q.shape[-1] ** 0.5 if scale is None else scores * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if slopes is not None:
        before = torch.arange(t - s, t)[:, None] - torch.arange(t)
        scores = scores - torch.tensor(slopes, dtype=torch.float64)[:, None, None] * before
    hidden = torch.ones(s, t, dtype=torch.bool).triu(t - s + 1)
    if window is not None:
        hidden |= torch.ones(s, t, dtype=torch.bool).tril(t - s - window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hst,thd->shd", weights, v.double()).to(q.dtype)


def by_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    most_q: int,
    most_k: int,
    **options: Any,
) -> Tensor:
    """Compute what flash kernels of variable lengths do: one attention per run."""
    assert q_ends.dtype == k_ends.dtype == torch.int32
    assert most_q == q_ends.diff().max()
    assert most_k == k_ends.diff().max()
    runs = [
        plain_attention(q[a:b], k[c:d], v[c:d], **options)
        for a, b, c, d in zip(q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False)
    ]
    return torch.cat(runs)


def flash_attn(patch: pytest.MonkeyPatch, version: str = "2.8.3") -> None:
    def plain_options(
        dropout_p: float,
        causal: bool,
        deterministic: bool,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
    ) -> dict[str, Any]:
        assert causal
        assert dropout_p == 0.0
        back, _ = window_size
        return {
            "scale": softmax_scale,
            "cap": softcap or None,
            "slopes": None if alibi_slopes is None else alibi_slopes.tolist(),
            "window": None if back < 0 else back + 1,
        }

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        own = plain_options(**options)
        return torch.stack([plain_attention(*row, **own) for row in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(*inputs: Any, **options: Any) -> Tensor:
        return by_runs(*inputs, **plain_options(**options))

    install(
        patch,
        "flash_attn",
        __version__=version,
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
    )


def varlen(patch: pytest.MonkeyPatch) -> None:
    def varlen_attn(
        *inputs: Any,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        back, ahead = window_size
        assert ahead == 0
        assert enable_gqa or inputs[0].shape[1] == inputs[1].shape[1]
        return by_runs(*inputs, scale=scale, window=None if back < 0 else back + 1)

    install(patch, "torch.nn.attention.varlen", varlen_attn=varlen_attn)
