"""The adapters, with the packages' place taken by torch: choice, self-check, faults noticed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.errors import ConfigError
from megapipe.ops import adam, norm, swiglu, weight_grad
from megapipe.ops.adam import AdamStep, torch_adam
from megapipe.ops.moe import grouped
from megapipe.ops.probe import KernelChoice, choose_kernel
from tests.unit.ops.fakes import (
    Applied,
    apex_adam,
    apex_norms,
    apex_weight_grad,
    liger,
    on_any_device,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def norms(dtype: torch.dtype, centred: bool, bias: bool = True) -> Any:
    return norm.candidates(device=CPU, dtype=dtype, hidden=48, eps=1e-5, centred=centred, bias=bias)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype, centred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_device(monkeypatch)
    assert choose_kernel("norm", "auto", norms(dtype, centred)).name == "torch"
    liger(monkeypatch)
    choice = choose_kernel("norm", "auto", norms(dtype, centred))
    assert choice.name == "liger"
    assert "apex is not installed (no module fused_layer_norm_cuda)" in choice.why
    apex_norms(monkeypatch)
    assert choose_kernel("norm", "auto", norms(dtype, centred)).name == "apex"
    x = torch.randn(3, 2, 48).to(dtype)
    weight, bias = torch.randn(48).to(dtype), torch.randn(48).to(dtype)
    for name in ("apex", "liger"):
        kernel = choose_kernel("norm", name, norms(dtype, centred)).kernel
        right = norm.torch_norm(x, weight, bias, 1e-5, centred)
        torch.testing.assert_close(kernel(x, weight, bias, 1e-5, centred), right)


def test_what_fused_norms_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    apex_norms(monkeypatch)
    assert (
        choose_kernel("norm", "auto", norms(torch.float32, True)).why == "apex, liger: needs a GPU"
    )
    on_any_device(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"kernels.only.norm=apex: computes in fp32, and the model is"
    ):
        choose_kernel("norm", "apex", norms(torch.float64, True))
    with pytest.raises(ConfigError, match=r"kernels.only.norm=apex: has no layernorm without bias"):
        choose_kernel("norm", "apex", norms(torch.float32, True, bias=False))
    assert choose_kernel("norm", "apex", norms(torch.float32, False, bias=False)).name == "apex"


class Doubled(torch.autograd.Function):
    """The value of x, and twice its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@pytest.mark.parametrize("fault", ["value", "gradient", "weight gradient"])
def test_a_wrong_norm_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_device(monkeypatch)
    apex_norms(monkeypatch)
    module = sys.modules["apex.normalization.fused_layer_norm"]
    right = module.fused_rms_norm_affine

    def wrong(x: Tensor, weight: Tensor, shape: Any, eps: float) -> Tensor:
        if fault == "value":
            return right(x, weight, shape, 100 * eps)
        if fault == "gradient":
            return right(Doubled.apply(x), weight, shape, eps)
        return right(x, Doubled.apply(weight), shape, eps)

    monkeypatch.setattr(module, "fused_rms_norm_affine", wrong)
    choice: KernelChoice[Any] = choose_kernel("norm", "auto", norms(torch.float32, False))
    assert choice.name == "torch"
    (warning,) = choice.warnings
    number = ["value", "gradient", "weight gradient"].index(fault)
    assert warning.startswith(
        f"kernels.only.norm: apex is not used: result {number} of its self-check"
    )
    with pytest.raises(
        ConfigError, match=f"kernels.only.norm=apex: result {number} of its self-check"
    ):
        choose_kernel("norm", "apex", norms(torch.float32, False))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_device(monkeypatch)
    candidates = swiglu.candidates(device=CPU, dtype=dtype)
    assert choose_kernel("swiglu", "auto", candidates).name == "torch"
    liger(monkeypatch)
    choice = choose_kernel("swiglu", "auto", candidates)
    assert choice.name == "liger"
    both = torch.randn(4, 12).to(dtype)
    torch.testing.assert_close(choice.kernel(both), swiglu.torch_swiglu(both))
    swapped = Applied(lambda a, b: swiglu.torch_swiglu(torch.cat((b, a), -1)))
    monkeypatch.setattr(sys.modules["liger_kernel.ops.swiglu"], "LigerSiLUMulFunction", swapped)
    assert choose_kernel("swiglu", "auto", candidates).warnings


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_swiglu_computes_again_what_it_does_not_keep_to_the_same_bits(dtype: torch.dtype) -> None:
    both, grad = torch.randn(7, 3, 2 * 37).to(dtype), torch.randn(7, 3, 37).to(dtype)
    results = []

    def plain(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    for kernel in (swiglu.torch_swiglu, plain):
        leaf = both.clone().requires_grad_()
        y = kernel(leaf)
        results.append((y, *torch.autograd.grad(y, [leaf], grad)))
    for ours, kept in zip(*results, strict=True):
        assert ours.equal(kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_device(monkeypatch)
    candidates = weight_grad.candidates(device=CPU, dtype=dtype)
    apex_weight_grad(monkeypatch)
    kernel = choose_kernel("weight_grad", "apex", candidates).kernel
    left, right = torch.randn(9, 4).to(dtype), torch.randn(9, 5).to(dtype)
    main = torch.randn(4, 5)
    expected = main + left.float().t() @ right.float()
    kernel(main, left, right)
    torch.testing.assert_close(main, expected)

    module = sys.modules["fused_weight_gradient_mlp_cuda"]
    monkeypatch.setattr(module, "wgrad_gemm_accum_fp32", lambda x, g, d: d.copy_(g.t() @ x))
    choice = choose_kernel("weight_grad", "auto", candidates)
    assert choice.name != "apex", "it overwrites instead of adding"
    assert choice.warnings


def test_fp32_weight_gradients_are_accumulated_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_device(monkeypatch)
    candidates = weight_grad.candidates(device=CPU, dtype=torch.float32)
    choice = choose_kernel("weight_grad", "auto", candidates)
    assert str(choice) == "weight_grad torch (apex, fused: takes bf16 and fp16, not float32)"


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs(decoupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels against torch.optim, over steps."""
    on_any_device(monkeypatch)
    apex_adam(monkeypatch)
    candidates = adam.candidates(device=CPU, dtype=torch.float32)
    assert choose_kernel("optimizer", "auto", candidates).name == "apex"
    optimizer = torch.optim.AdamW if decoupled else torch.optim.Adam
    for name in ("apex", "torch"):
        kernel = choose_kernel("optimizer", name, candidates).kernel
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(20, generator=generator)
        parameter = torch.nn.Parameter(weights.clone())
        plain = optimizer([parameter], lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
        mean, square = torch.zeros(20), torch.zeros(20)
        for step in range(1, 5):
            grad = torch.randn(20, generator=generator)
            parameter.grad = grad.clone()
            plain.step()
            now = AdamStep(0.01, 0.8, 0.9, 1e-6, 0.1, decoupled=decoupled, step=step)
            kernel(weights, grad, mean, square, now)
        torch.testing.assert_close(weights, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_wrong_adam_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_device(monkeypatch)
    apex_adam(monkeypatch)
    module = sys.modules["amp_C"]
    right = module.multi_tensor_adam

    def without_correction(*arguments: Any) -> None:
        right(*arguments[:9], 0, *arguments[10:])

    monkeypatch.setattr(module, "multi_tensor_adam", without_correction)
    choice = choose_kernel("optimizer", "auto", adam.candidates(device=CPU, dtype=torch.float32))
    assert choice.kernel is torch_adam
    assert choice.warnings


def test_fp64_updates_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_device(monkeypatch)
    apex_adam(monkeypatch)
    choice = choose_kernel("optimizer", "auto", adam.candidates(device=CPU, dtype=torch.float64))
    assert str(choice) == "optimizer torch (apex: updates in fp32, and the model is fp64)"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ends", [(7,), (0, 7, 7, 30), (3, 3), (0, 0, 0)])
def test_grouped_products(ends: tuple[int, ...], dtype: torch.dtype) -> None:
    """ScatterMoE: they equal the products of each expert, also of experts without rows."""
    candidates = grouped.candidates(device=CPU, dtype=dtype, widths=[16, 24])
    assert choose_kernel("experts", "auto", candidates).name == "loop"
    kernel = choose_kernel("experts", "grouped", candidates).kernel
    x, weight = torch.randn(ends[-1], 16).to(dtype), torch.randn(len(ends), 24, 16).to(dtype)
    for rows, matrices in ((x, weight.transpose(1, 2)), (x.repeat(1, 3)[:, :24], weight)):
        starts = (0, *ends)
        alone = [rows[a:b] @ w for a, b, w in zip(starts, ends, matrices, strict=False)]
        for product in (kernel, grouped.loop_product):
            torch.testing.assert_close(product(rows, matrices, ends), torch.cat(alone))


def test_where_products_are_not_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    def grouped_products(
        widths: list[int], dtype: torch.dtype
    ) -> KernelChoice[grouped.GroupedKernel]:
        candidates = grouped.candidates(device=CPU, dtype=dtype, widths=widths)
        return choose_kernel("experts", "grouped", candidates)

    assert grouped_products([16, 4], torch.float32).kernel is grouped.grouped_product
    with pytest.raises(ConfigError, match=r"experts=grouped: needs rows of multiples of 16 b"):
        grouped_products([16, 4], torch.bfloat16)
    with pytest.raises(ConfigError, match=r"computes in fp32, and the model is fp64"):
        grouped_products([16], torch.float64)
    monkeypatch.setattr(
        grouped, "grouped_product", lambda x, w, ends: grouped.loop_product(x, w.flip(0), ends)
    )
    with pytest.raises(ConfigError, match=r"result 0 of its self-check is "):
        grouped_products([16], torch.float32)
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    with pytest.raises(ConfigError, match=r"has no grouped_mm; expected auto"):
        grouped_products([16], torch.float32)
