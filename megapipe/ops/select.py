"""From a configuration to the kernels that a process uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megapipe.config import Config
from megapipe.ops import adam, attention_choice, norm, swiglu, weight_grad
from megapipe.ops.attention import AttentionKernel
from megapipe.ops.attention_choice import Attended, torch_choice
from megapipe.ops.compiler import torch_compile
from megapipe.ops.kernels import Kernels
from megapipe.ops.probe import Choice, Unavailable, choose


def select_kernels(
    config: Config, device: torch.device, dtype: torch.dtype, *, cut: bool = False
) -> Kernels:
    """The kernels of a resolved configuration; `dtype` is the model's.

    Each one that is not torch's own is compared with torch's on small data first. `cut`: the
    schedule cuts sequences into slices. Raises :class:`ConfigError` where a kernel is asked for by
    name and cannot be used.
    """
    model, wanted = config.model, config.kernels
    main = torch.float64 if dtype == torch.float64 else torch.float32
    assert model.kv_heads is not None
    assert model.head_dim is not None
    given = Attended(
        device=device,
        dtype=dtype,
        heads=model.heads // config.parallel.tp,
        groups=model.kv_heads // config.parallel.tp,
        head_dim=model.head_dim,
        length=config.train.sequence_length,
        dropout=model.dropout,
        documents=config.data.document_mask,
        cut=cut,
        compiled=wanted.compile,
    )
    norms = norm.candidates(
        device=device,
        dtype=dtype,
        hidden=model.hidden,
        eps=model.norm_eps,
        centred=model.norm == "layernorm",
        bias=model.bias,
        compiled=wanted.compile,
    )
    gates = swiglu.candidates(device=device, dtype=dtype, compiled=wanted.compile)
    products = weight_grad.candidates(device=device, dtype=dtype)
    updates = adam.candidates(device=device, dtype=main)
    attention = _attention(wanted.attention, given)
    normed = choose("norm", wanted.norm, norms)
    gated = choose("swiglu", wanted.swiglu, gates)
    accumulated = choose("weight_grad", wanted.weight_grad, products)
    updated = choose("optimizer", wanted.optimizer, updates)
    used: list[Choice[Any]] = [attention, normed, accumulated]
    if model.activation == "swiglu":
        used.append(gated)
    if wanted.compile:
        used.append(Choice("blocks", "compiled", "torch.compile", torch_compile))
    if config.optimizer.rule in ("adamw", "adam", "muon"):
        used.append(updated)
    return Kernels(
        attention=attention.kernel,
        norm=normed.kernel,
        swiglu=gated.kernel,
        accumulate=accumulated.kernel,
        adam=updated.kernel,
        choices=used,
        compiler=torch_compile if wanted.compile else None,
        loss_chunk=wanted.loss_tokens(cuda=device.type == "cuda"),
        overlap=wanted.overlap,
    )


def _attention(wanted: str, given: Attended) -> Choice[AttentionKernel]:
    """The kernel; where that is SDPA, the banner says what torch itself will choose."""
    choice = choose("attention", wanted, attention_choice.candidates(given))
    if choice.name != "SDPA":
        return choice
    backend = torch_choice(given)
    reasons = [choice.why] if choice.why else []
    if backend != "flash":
        try:
            torch_choice(given, "flash")
        except Unavailable as reason:
            reasons.append(f"flash: {reason}")
    return replace(choice, name=backend, why="; ".join(["SDPA", *reasons]))
