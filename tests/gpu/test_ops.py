"""Installed kernels on a CUDA device, compared with torch's plain arithmetic in fp64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel

from megapipe.errors import ConfigError
from megapipe.layers.moe.tasks import ExpertsTask
from megapipe.ops import adam, loss, norm, rotary, swiglu, weight_grad
from megapipe.ops.adam import AdamStep, torch_adam
from megapipe.ops.attention import AttentionKernel, Sdpa
from megapipe.ops.attention_choice import AttentionShape, candidates, torch_choice
from megapipe.ops.documents import Documents, varlen_lengths
from megapipe.ops.moe import grouped
from megapipe.ops.packed_tile_kernels import OneByOne, PackedTileKernel
from megapipe.ops.probe import choose_kernel
from megapipe.ops.tile_attention import MathTile, TileKernel, accumulation, merge
from megapipe.ops.tile_candidates import block_candidates, packed_candidates
from megapipe.testing import run_world
from tests.parity.ranks import Case, check_case, run_cases

DEVICE = torch.device("cuda")
HALF = [torch.bfloat16, torch.float16]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def kernel_of(purpose: str, name: str, offered: list[Any]) -> Any:
    """Return the kernel after its self-check. Skip the test only if its package is missing or torch
    is too old for it."""
    try:
        return choose_kernel(purpose, name, offered).kernel
    except ConfigError as error:
        if not any(why in str(error) for why in ("is not installed", "has an earlier")):
            raise
        pytest.skip(str(error))


def assert_as_good(found: list[Tensor], usual: list[Tensor], exact: list[Tensor]) -> None:
    """Assert that each result's worst error is at most twice that of torch's own kernel."""
    for i, ratio in enumerate(worst_errors(found, usual, exact)):
        assert ratio <= 2, f"result {i}: {ratio:.3g} times as far off"


def worst_errors(found: list[Tensor], usual: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Return each result's worst error over that of torch's own kernel, or over rounding."""
    ratios = []
    for got, plain, right in zip(found, usual, exact, strict=True):
        error = (got.double() - right).abs().max().item()
        rounding = torch.finfo(got.dtype).eps * right.abs().max().item()
        ratios.append(error / max((plain.double() - right).abs().max().item(), rounding))
    return ratios


def assert_as_good_on_average(
    found: list[Tensor], usual: list[Tensor], exact: list[Tensor]
) -> None:
    """Assert that each result's RMS error, which chance hardly moves, is as good."""
    for i, (got, plain, right) in enumerate(zip(found, usual, exact, strict=True)):
        error, other = ((x.double() - right).square().mean().sqrt().item() for x in (got, plain))
        assert error <= 2 * other, f"result {i}: {error:.3g} off, at most {2 * other:.3g}"


def run_attention(kernel: AttentionKernel, inputs: list[Tensor], documents: Any) -> list[Tensor]:
    *leaves, grad = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    y = kernel(*leaves, 0.0, documents)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize(("s", "groups"), [(1024, 8), (1024, 2), (300, 8)])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "name", ["auto", "flash", "efficient", "cudnn", "flash_attn", "varlen", "flex"]
)
def test_attention(
    name: str, dtype: torch.dtype, s: int, groups: int, with_documents: bool
) -> None:
    b, t, heads, d = 2, 1024, 8, 64
    given = AttentionShape(DEVICE, dtype, heads, groups, d, t, documents=with_documents, cut=s < t)
    offered = candidates(given)
    if name in ("flash", "efficient", "cudnn"):
        try:
            kernel = choose_kernel("attention", name, offered).kernel
        except ConfigError as error:
            pytest.skip(str(error))  # what torch's backend cannot do, torch says
    else:
        kernel = kernel_of("attention", name, offered)
    ids = torch.zeros(b, t, dtype=torch.long)
    ids[0, [100, 101, 700]] = ids[1, [512]] = 1
    documents = Documents(ids.cumsum(-1), DEVICE) if with_documents else None
    torch.manual_seed(0)
    shapes = [(b, heads, s, d), (b, groups, t, d), (b, groups, t, d), (b, heads, s, d)]
    inputs = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    plain = Sdpa(partial(sdpa_kernel, SDPBackend.MATH))
    exact = run_attention(plain, [x.double() for x in inputs], documents)
    usual = run_attention(plain, inputs, documents)
    assert_as_good(run_attention(kernel, inputs, documents), usual, exact)


class NarrowFactors(MathTile):
    """Rounds what fused kernels round. These are factors of products with values, queries and keys:
    probabilities and score gradients. Gradients of a key's heads are rounded before their sum."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        x, _, wide_v = self._scores(q, k, v, causal, scale)
        lse = x.logsumexp(-1, keepdim=True)
        top = x.amax(-1, keepdim=True)
        factors = (x - top).exp().to(q.dtype).to(x.dtype)
        out = factors @ wide_v.unsqueeze(2) / (lse - top).exp()
        return out.flatten(1, 2).to(q.dtype), lse.squeeze(-1).flatten(1, 2)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        def narrow(x: Tensor) -> Tensor:
            return x.to(q.dtype).to(x.dtype)

        x, wide_k, wide_v = self._scores(q, k, v, causal, scale)
        heads = (k.shape[1], -1)
        wide_q, wide_grad, wide_out = (y.to(x.dtype).unflatten(1, heads) for y in (q, grad, out))
        factors = (x - lse.unflatten(1, heads).unsqueeze(-1)).exp()
        mean = (wide_grad * wide_out).sum(-1, keepdim=True)
        grad_x = narrow((wide_grad @ wide_v.unsqueeze(2).mT - mean) * factors)
        grad_x *= q.shape[-1] ** -0.5 if scale is None else scale
        grad_q = (grad_x @ wide_k.unsqueeze(2)).flatten(1, 2)
        grad_k = narrow(grad_x.mT @ wide_q).sum(2)
        grad_v = narrow(narrow(factors).mT @ wide_grad).sum(2)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def run_blocks(kernel: TileKernel, inputs: list[Tensor], s: int) -> list[Tensor]:
    """Return output, LSE and gradients of a causal tile of the last queries, and of a tile before
    it."""
    q, k, v, grad = inputs
    own = slice(k.shape[2] - s, None)
    before = slice(0, k.shape[2] - s)
    out = torch.zeros_like(q, dtype=accumulation(q.dtype))
    lse = out.new_full(q.shape[:3], float("-inf"))
    for keys, causal in ((own, True), (before, False)):
        merge(out, lse, *kernel.forward(q, k[:, :, keys], v[:, :, keys], causal, None))
    grads = [torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v)]
    for keys, causal in ((own, True), (before, False)):
        part = k[:, :, keys], v[:, :, keys], out.to(q.dtype), lse, causal, None
        grad_q, grad_k, grad_v = kernel.backward(grad, q, *part)
        grads[0] += grad_q
        grads[1][:, :, keys] += grad_k
        grads[2][:, :, keys] += grad_v
    return [out, lse, *grads]


@pytest.mark.parametrize(("s", "groups"), [(512, 8), (512, 2), (300, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient", "flash_attn"])
def test_blocks_of_attention(name: str, dtype: torch.dtype, s: int, groups: int) -> None:
    given = AttentionShape(DEVICE, dtype, 8, groups, 64, s)
    try:
        kernel = choose_kernel("attention", name, block_candidates(given)).kernel
    except ConfigError as error:
        if "self-check" in str(error):
            raise
        pytest.skip(str(error))  # what a kernel cannot do here, torch says
    # in fp32 the worst place of one draw is chance (docs/benchmarks.md)
    draws = 25 if dtype == torch.float32 else 1
    ratios = []
    for seed in range(draws):
        torch.manual_seed(seed)
        keys = (2, groups, s + 500, 64)
        shapes = [(2, 8, s, 64), keys, keys, (2, 8, s, 64)]
        inputs = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
        exact = run_blocks(MathTile(), [x.double() for x in inputs], s)
        usual = run_blocks(NarrowFactors(), inputs, s)
        found = run_blocks(kernel, inputs, s)
        assert_as_good_on_average(found, usual, exact)
        ratios.append(worst_errors(found, usual, exact))
    for i, of_draws in enumerate(zip(*ratios, strict=True)):
        assert statistics.median(of_draws) <= 2, f"result {i}: {of_draws} times as far off"


def run_packs(
    kernel: PackedTileKernel, inputs: list[Tensor], lengths: list[tuple[int, int]], causal: bool
) -> list[Tensor]:
    """Return output, LSE and gradients, as if each row saw further keys, with values of 0."""
    q, k, v, grad = inputs
    runs = varlen_lengths(lengths, DEVICE)
    out, lse = kernel.forward(q, k, v, runs, causal, None)
    whole = (out * math.exp(-1 / 4)).to(q.dtype), lse + 1 / 4
    return [out, lse, *kernel.backward(grad, q, k, v, *whole, runs, causal, None)]


LENGTHS = {
    "causal": [(n, n) for n in (1, 300, 1, 1, 77, 128)],
    "all of one": [(1, 1)] * 5,
    "full": [(1, 700), (5, 3), (300, 1), (128, 128), (1, 1)],
}


@pytest.mark.parametrize("which", LENGTHS)
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["flash", "flash_attn"])
def test_many_blocks_at_once(name: str, dtype: torch.dtype, groups: int, which: str) -> None:
    given = AttentionShape(DEVICE, dtype, 8, groups, 64, 512)
    blocks = kernel_of("attention", name, block_candidates(given))
    choice = choose_kernel("attention", "auto", packed_candidates(given, blocks))
    assert choice.kernel is not None, choice.warnings
    torch.manual_seed(0)
    lengths = LENGTHS[which]
    rows, keys = (sum(side) for side in zip(*lengths, strict=True))
    shapes = [(rows, 8, 64), (keys, groups, 64), (keys, groups, 64), (rows, 8, 64)]
    inputs = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    plain, narrow = OneByOne(MathTile()), OneByOne(NarrowFactors())
    exact = run_packs(plain, [x.double() for x in inputs], lengths, which != "full")
    usual = run_packs(narrow, inputs, lengths, which != "full")
    assert_as_good(run_packs(choice.kernel, inputs, lengths, which != "full"), usual, exact)


def test_auto_takes_a_fused_kernel_for_blocks() -> None:
    given = AttentionShape(DEVICE, torch.bfloat16, 32, 8, 128, 4096)
    assert choose_kernel("attention", "auto", block_candidates(given)).name == "flash"


def test_auto_does_not_fall_back_to_plain_arithmetic() -> None:
    given = AttentionShape(DEVICE, torch.bfloat16, 16, 16, 128, 4096)
    assert torch_choice(given) in ("flash", "cudnn")
    choice = choose_kernel("attention", "auto", candidates(given))
    assert choice.name == "SDPA"
    packed = AttentionShape(DEVICE, torch.bfloat16, 16, 16, 128, 4096, documents=True)
    assert choose_kernel("attention", "auto", candidates(packed)).name in ("varlen", "SDPA")


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", ["apex", "liger"])
def test_norms(name: str, dtype: torch.dtype, centred: bool) -> None:
    hidden = 1600
    kernel = kernel_of(
        "norm",
        name,
        norm.candidates(
            device=DEVICE, dtype=dtype, hidden=hidden, eps=1e-5, centred=centred, bias=True
        ),
    )
    torch.manual_seed(0)
    shapes = [(512, 4, hidden), (hidden,), (hidden,), (512, 4, hidden)]
    *leaves, grad = (torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes)

    def run(of: norm.NormKernel, precision: torch.dtype) -> list[Tensor]:
        x, weight, bias = (leaf.to(precision).requires_grad_() for leaf in leaves)
        y = of(x, weight, bias, 1e-5, centred)
        used = [x, weight, bias] if centred else [x, weight]
        return [y.detach(), *torch.autograd.grad(y, used, grad.to(precision))]

    usual, exact = (run(norm.torch_norm, precision) for precision in (dtype, torch.float64))
    assert_as_good(run(kernel, dtype), usual, exact)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_swiglu(dtype: torch.dtype) -> None:
    kernel = kernel_of("swiglu", "liger", swiglu.candidates(device=DEVICE, dtype=dtype))
    torch.manual_seed(0)
    both = torch.randn(512, 4, 2 * 1376, device=DEVICE).to(dtype)
    kept = both.clone()
    grad = torch.randn(512, 4, 1376, device=DEVICE).to(dtype)

    def run(of: swiglu.SwigluKernel, precision: torch.dtype) -> list[Tensor]:
        leaf = both.to(precision).requires_grad_()
        y = of(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf], grad.to(precision))]

    usual, exact = (run(swiglu.torch_swiglu, precision) for precision in (dtype, torch.float64))
    assert_as_good(run(kernel, dtype), usual, exact)
    assert both.equal(kept), "its backward writes into copies only"


def test_the_gate_is_compiled_once_for_any_number_of_rows() -> None:
    kernel = kernel_of("swiglu", "inductor", swiglu.candidates(device=DEVICE, dtype=torch.bfloat16))
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for rows in (4096, 5, 17, 0, 1, 33, 1000):
        both = torch.randn(rows, 256, device=DEVICE).bfloat16().requires_grad_()
        grad = torch.randn(rows, 128, device=DEVICE).bfloat16()
        found, usual = (of(both) for of in (kernel, swiglu.torch_swiglu))
        pairs = [torch.autograd.grad(y, [both], grad)[0] for y in (found, usual)]
        torch.testing.assert_close(found, usual, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(*pairs, rtol=2e-2, atol=1e-2)
    assert counters["unique_graphs"] - before <= 2, "forward and backward"


@pytest.mark.parametrize("ends", [(2048, 2048, 2049, 4096), (0, 0, 0, 512), (128, 256, 384, 512)])
def test_products_of_experts(ends: tuple[int, ...]) -> None:
    offered = grouped.candidates(device=DEVICE, dtype=torch.bfloat16, widths=[256, 704])
    choice = choose_kernel("expert_gemm", "auto", offered)
    assert choice.name == "grouped"
    torch.manual_seed(0)
    for width, length in ((256, 704), (704, 256)):
        x = torch.randn(ends[-1], width, device=DEVICE).bfloat16()
        weight = torch.randn(len(ends), length, width, device=DEVICE).bfloat16()
        for matrices in (weight.transpose(1, 2), weight.transpose(1, 2).contiguous()):
            found = choice.kernel(x, matrices, ends)
            usual = grouped.loop_product(x, matrices, ends)
            exact = grouped.loop_product(x.double(), matrices.double(), ends)
            assert_as_good([found], [usual], [exact])


@pytest.mark.parametrize("name", ["apex", "fused", "torch"])
@pytest.mark.parametrize("dtype", HALF)
def test_weight_gradients_keep_fp32(name: str, dtype: torch.dtype) -> None:
    """Neither product nor sum is rounded to the factors' type."""
    offered = weight_grad.candidates(device=DEVICE, dtype=dtype)
    kernel = kernel_of("weight_grad", name, offered)
    torch.manual_seed(0)
    main = torch.randn(96, 160, device=DEVICE)
    exact = main.double()
    for _ in range(3):
        left, right = (torch.randn(2048, n, device=DEVICE).to(dtype) for n in (96, 160))
        exact += left.double().t() @ right.double()
        kernel(main, left, right)
    assert (main.double() - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("name", ["apex", "fused", "torch"])
@pytest.mark.parametrize("dtype", HALF)
def test_gradients_of_experts_keep_fp32(name: str, dtype: torch.dtype) -> None:
    """For matrices and weighted biases; one expert has no rows and one has most of them."""
    offered = weight_grad.candidates(device=DEVICE, dtype=dtype)
    kernel = kernel_of("weight_grad", name, offered)
    torch.manual_seed(0)
    ends = 300, 300, 3000, 3017
    shapes = (4, 1, 96, 160), (4, 1, 96)
    weight, bias = (Parameter(torch.zeros(n, device=DEVICE, dtype=dtype)) for n in shapes)
    mains = [torch.randn(n, device=DEVICE) for n in shapes]
    for parameter, main in zip((weight, bias), mains, strict=True):
        cast(Any, parameter).main_grad = main
    exact = [main.double() for main in mains]
    for _ in range(3):
        grad, x = (torch.randn(ends[-1], n, device=DEVICE).to(dtype) for n in (96, 160))
        gate = torch.rand(ends[-1], device=DEVICE)
        ExpertsTask(weight, bias, x, grad, ends, kernel, weighted=gate).run()
        for expert, rows in grouped.each_expert(ends):
            of_expert = grad[rows].double().t()
            exact[0][expert, 0] += of_expert @ x[rows].double()
            exact[1][expert, 0] += of_expert @ gate[rows].double()
    for main, right in zip(mains, exact, strict=True):
        assert (main.double() - right).abs().max() < 1e-5 * right.abs().max()


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam(decoupled: bool) -> None:
    kernel = kernel_of("optimizer", "apex", adam.candidates(device=DEVICE, dtype=torch.float32))
    torch.manual_seed(0)
    ours = [torch.randn(100_003, device=DEVICE).abs() for _ in range(3)]
    torchs = [x.clone() for x in ours]
    for step in range(1, 6):
        grad = torch.randn(100_003, device=DEVICE)
        now = AdamStep(0.01, 0.9, 0.95, 1e-8, 0.1, decoupled=decoupled, step=step)
        for update, (master, mean, square) in ((kernel, ours), (torch_adam, torchs)):
            update(master, grad.clone(), mean, square, now)
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_documents_in_training() -> None:
    """fp64: masks on the device, forward and backward, whole and in slices."""
    case = Case(documents=True, model="llama", kv_heads=2, sequence=12)
    cases = [
        case,
        Case(documents=True, pp=4, m=6, schedule="zb_h1", in_process=True, sequence=12),
        Case(documents=True, pp=2, m=3, slices=3, schedule="seq1f1b", in_process=True),
    ]
    results = run_world(1, run_cases, cases, "cuda", timeout_s=300.0)
    for i, one in enumerate(cases):
        check_case(one, [outcomes[i] for outcomes in results])


def launched(run: Callable[[], Any]) -> int:
    """Count the kernels of a call that has been made before."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())


@pytest.mark.parametrize("dtype", HALF)
def test_what_inductor_makes_is_few_kernels(dtype: torch.dtype) -> None:
    """At most two per direction; five for the loss in addition to its GEMMs, as in
    docs/benchmarks.md."""
    turn = kernel_of("rotary", "inductor", rotary.candidates(device=DEVICE, dtype=dtype))
    x = torch.randn(64, 2, 4, 3, 64, device=DEVICE, dtype=dtype)
    table = torch.randn(64, 1, 1, 1, 64, device=DEVICE, dtype=dtype)
    assert launched(lambda: turn(x, table, table, 1)) <= 2
    gate = kernel_of("swiglu", "inductor", swiglu.candidates(device=DEVICE, dtype=dtype))
    both = torch.randn(64, 2, 512, device=DEVICE, dtype=dtype, requires_grad=True)
    grad = torch.randn(64, 2, 256, device=DEVICE, dtype=dtype)
    assert launched(lambda: gate(both)) <= 2
    y = gate(both)
    assert launched(lambda: torch.autograd.grad(y, both, grad, retain_graph=True)) <= 2
    kernel = kernel_of("loss", "inductor", loss.candidates(device=DEVICE, dtype=dtype))
    logits = torch.randn(128, 1000, device=DEVICE, dtype=dtype)
    labels = loss.Labels.of(torch.arange(128, device=DEVICE), 1000, 0, 990)
    gathered = kernel.local_stats(logits, labels).unsqueeze(0)
    weights = torch.ones(128, device=DEVICE)
    steps = launched(lambda: kernel.local_stats(logits, labels))
    steps += launched(lambda: kernel.results(logits, labels, gathered, weights))
    assert steps <= 5
