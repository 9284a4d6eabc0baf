"""The best rates of the device at a model's shapes: the ceilings of a measured step."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from common import seconds
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ladder.records import Calibration
from ladder.sizes import Size
from megapipe.config.model import ModelConfig
from megapipe.layers.activation_policy import padded_vocabulary
from megapipe.model.gpt.parameters import known

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def calibrate(size: Size, device: torch.device) -> Calibration:
    """Measure rates of matrix products, of copies, and of each attention backend."""
    tokens = 16384 if device.type == "cuda" else 4 * size.sequence
    rows = tokens // size.sequence
    return Calibration(
        size=size.name,
        matmul_tflops=matmul_rate(size.model, tokens, device) / 1e12,
        copy_gbs=copy_rate(device) / 1e9,
        attention={name: attention_ms(size, rows, device, name) for name in BACKENDS},
        attention_tokens=tokens,
    )


def products(model: ModelConfig) -> list[tuple[int, int, int]]:
    """Return (uses, inputs, outputs) of the linear layers of a model; the experts of a token count
    as one layer of their widths together."""
    head_dim, h = known(model.head_dim), model.hidden
    queries = model.heads * head_dim
    moe = model.moe
    ffn = (
        known(model.ffn_hidden)
        if moe.num_experts is None
        else moe.top_k * known(moe.expert_ffn_hidden)
    )
    gates = 2 if model.activation == "swiglu" else 1
    return [
        (model.layers, h, queries + 2 * known(model.kv_heads) * head_dim),
        (model.layers, queries, h),
        (model.layers, h, gates * ffn),
        (model.layers, ffn, h),
        (1, h, padded_vocabulary(known(model.vocab_size), 1)),
    ]


def matmul_rate(model: ModelConfig, tokens: int, device: torch.device) -> float:
    """Measure FLOP/s over the products of a step: y = x W^T, dx = dy W, dW = dy^T x."""
    dtype = _dtype(device)
    flops = time = 0.0
    for uses, inputs, outputs in products(model):
        x = torch.randn(tokens, inputs, device=device, dtype=dtype)
        dy = torch.randn(tokens, outputs, device=device, dtype=dtype)
        w = torch.randn(outputs, inputs, device=device, dtype=dtype)
        for left, right in ((x, w.t()), (dy, w), (dy.t(), x)):
            time += uses * _median(lambda a=left, b=right: a @ b, device)  # type: ignore[misc]
            flops += uses * 2 * tokens * inputs * outputs
    return flops / time


def copy_rate(device: torch.device) -> float:
    """Measure bytes read and written per second."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**22, dtype=torch.uint8, device=device)
    out = torch.empty_like(source)
    return 2 * source.numel() / _median(lambda: out.copy_(source), device)


def attention_ms(size: Size, rows: int, device: torch.device, backend: str) -> float | None:
    """Time forward and backward at [rows, heads, s, d] in milliseconds; None if it cannot do
    this."""
    model = size.model
    shapes = [
        (rows, n, size.sequence, known(model.head_dim))
        for n in (model.heads, known(model.kv_heads), known(model.kv_heads))
    ]
    q, k, v = (
        torch.randn(shape, device=device, dtype=_dtype(device), requires_grad=True)
        for shape in shapes
    )
    gqa = model.heads != model.kv_heads

    def run() -> None:
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        torch.autograd.grad(y, [q, k, v], y)

    with sdpa_kernel(BACKENDS[backend]):
        try:
            run()
        except RuntimeError:
            return None
        return _median(run, device) * 1e3


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _median(run: Callable[[], object], device: torch.device) -> float:
    """Time one call in seconds: the median of five blocks, after one that warms up."""
    calls = 10 if device.type == "cuda" else 1

    def block() -> None:
        for _ in range(calls):
            run()

    block()
    return max(statistics.median(seconds(block, device) for _ in range(5)) / calls, 1e-9)
