"""Selection of the kernels that a process uses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megapipe.config.config import Config, KernelsConfig
from megapipe.config.update_rules import declaration
from megapipe.context.split import PositionSplit
from megapipe.model.kernel_needs import KernelNeeds
from megapipe.ops import adam, attention_choice, loss, norm, rotary, swiglu, weight_grad
from megapipe.ops.attention import AttentionKernel
from megapipe.ops.attention_choice import AttentionShape, torch_choice
from megapipe.ops.compiler import torch_compile
from megapipe.ops.kernels import Kernels
from megapipe.ops.moe import elementwise, grouped
from megapipe.ops.packed_tile_kernels import PackedTileKernel
from megapipe.ops.probe import KernelChoice, Unavailable, choose_kernel
from megapipe.ops.tile_attention import MathTile, TileKernel
from megapipe.ops.tile_candidates import block_candidates, packed_candidates


def select_kernels(
    config: Config,
    needs: KernelNeeds,
    device: torch.device,
    dtype: torch.dtype,
    *,
    cut: bool = False,
    split: PositionSplit | None = None,
) -> Kernels:
    """Select the kernels that the model `needs` for a resolved configuration and the type `dtype`.

    Each kernel that is not torch's is first compared with torch's on small data. `cut`: whether the
    schedule cuts sequences into slices. `split`: how positions are split; None if attention is not
    computed in tiles. Raises :class:`ConfigError` if a kernel that is requested by name cannot be
    used.
    """
    wanted, only = config.kernels, config.kernels.only
    choose = partial(choose_kernel, without=wanted.without)
    main = torch.float64 if dtype == torch.float64 else torch.float32
    found: dict[str, KernelChoice[Any]] = {}
    if needs.attention is not None:
        attended = AttentionShape(
            device=device,
            dtype=dtype,
            **needs.attention._asdict(),
            length=config.train.sequence_length,
            documents=config.data.masks_documents,
            cut=cut,
            compiled=wanted.compile,
        )
        if split is None:
            found["attention"] = _attention(wanted, attended)
        else:
            found["attention_tile"] = tiles = _tile_kernel(config, attended, split)
            if attended.documents:
                found["packed_attention_tile"] = _packed_kernel(
                    _on_a_rank(attended, split), tiles.kernel, wanted
                )
    if needs.norm is not None:
        norms = norm.candidates(
            device=device, dtype=dtype, **needs.norm._asdict(), compiled=wanted.compile
        )
        found["norm"] = choose("norm", only.norm, norms)
    products = weight_grad.candidates(device=device, dtype=dtype)
    found["accumulate"] = choose("weight_grad", only.weight_grad, products)
    if needs.experts:
        of_experts = grouped.candidates(device=device, dtype=dtype, widths=needs.experts)
        found["experts"] = choose("expert_gemm", only.expert_gemm, of_experts)
        around = elementwise.candidates(device=device, dtype=dtype)
        found["moe_elementwise"] = choose("moe_elementwise", only.moe_elementwise, around)
    if needs.rotary:
        turns = rotary.candidates(device=device, dtype=dtype, compiled=wanted.compile)
        found["rotary"] = choose("rotary", only.rotary, turns)
    if needs.loss:
        losses = loss.candidates(device=device, dtype=dtype)
        found["loss"] = choose("loss", only.loss, losses)
    if needs.gate:
        gates = swiglu.candidates(device=device, dtype=dtype, compiled=wanted.compile)
        found["swiglu"] = choose("swiglu", only.swiglu, gates)
    used = list(found.values())
    if wanted.compile:
        used.append(KernelChoice("blocks", "compiled", "torch.compile", torch_compile))
    updates = adam.candidates(device=device, dtype=main)
    updated = found["adam"] = choose("optimizer", only.optimizer, updates)
    if declaration(config.optimizer.rule).takes_kernel:
        used.append(updated)
    return Kernels(
        **{purpose: choice.kernel for purpose, choice in found.items()},
        choices=used,
        compiler=torch_compile if wanted.compile else None,
        loss_chunk=config.loss_tokens(cuda=device.type == "cuda"),
        overlap=wanted.tp_comm_overlap,
    )


def _tile_kernel(
    config: Config, attention: AttentionShape, split: PositionSplit
) -> KernelChoice[TileKernel]:
    """Select the attention tile kernel; its banner line says why attention is tiled, and how."""
    of_rank = _on_a_rank(attention, split)
    if of_rank.scores.plain:
        choice = choose_kernel(
            "attention",
            config.kernels.only.attention,
            block_candidates(of_rank),
            config.kernels.without,
        )
    else:
        why = "score modifiers that no kernel with an LSE output has"
        choice = KernelChoice[TileKernel]("attention", "explicit", why, MathTile())
    reasons = ["activations.keep_attention" if split.cp == 1 else f"parallel.cp={split.cp}"]
    reasons += [f"heads over {split.ulysses}"] if split.ulysses > 1 else []
    context = config.context
    reasons += (
        [f"{context.algorithm} of {split.ring}, {context.position_split}"] if split.ring > 1 else []
    )
    why = "; ".join([", ".join(reasons), *([choice.why] if choice.why else [])])
    return replace(choice, name=f"{choice.name} by tiles", why=why)


def _packed_kernel(
    of_rank: AttentionShape, tile: TileKernel, wanted: KernelsConfig
) -> KernelChoice[PackedTileKernel | None]:
    """Select the kernel that computes many tiles in one call, to match the tile kernel `tile`."""
    choice = choose_kernel("attention", "auto", packed_candidates(of_rank, tile), wanted.without)
    return replace(choice, purpose="documents")


def _on_a_rank(attention: AttentionShape, split: PositionSplit) -> AttentionShape:
    """Return the shape of one rank's attention tile, with positions split by `split`."""
    return replace(
        attention,
        heads=attention.heads // split.ulysses,
        groups=max(1, attention.groups // split.ulysses),
        length=attention.length // split.ring,
        documents=False,
        cut=False,
        compiled=False,
    )


def _attention(wanted: KernelsConfig, attention: AttentionShape) -> KernelChoice[AttentionKernel]:
    """Select the attention kernel; for SDPA the banner says which backend torch will choose."""
    choice = choose_kernel(
        "attention", wanted.only.attention, attention_choice.candidates(attention), wanted.without
    )
    if choice.name != "SDPA":
        return choice
    if attention.written_out:
        why = "score modifiers that no kernel of this torch has"
        return replace(choice, name="explicit", why=why)
    backend = torch_choice(attention)
    reasons = [choice.why] if choice.why else []
    if backend != "flash":
        try:
            torch_choice(attention, "flash")
        except Unavailable as reason:
            reasons.append(f"flash: {reason}")
    return replace(choice, name=backend, why="; ".join(["SDPA", *reasons]))
