"""The choice of the kernels that a process uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megapipe.config.config import Config
from megapipe.config.update_rules import declaration
from megapipe.context.split import PositionSplit
from megapipe.model.kernel_needs import KernelNeeds
from megapipe.ops import adam, attention_choice, loss, norm, rotary, swiglu, weight_grad
from megapipe.ops.attention import AttentionKernel
from megapipe.ops.attention_choice import AttentionShape, torch_choice
from megapipe.ops.block_attention import MathTile, TileKernel
from megapipe.ops.block_choice import block_candidates, packed_candidates
from megapipe.ops.compiler import torch_compile
from megapipe.ops.kernels import Kernels
from megapipe.ops.moe import grouped
from megapipe.ops.moe import rows as expert_rows
from megapipe.ops.packed_kernels import PackedTileKernel
from megapipe.ops.probe import KernelChoice, Unavailable, choose_kernel


def select_kernels(
    config: Config,
    needs: KernelNeeds,
    device: torch.device,
    dtype: torch.dtype,
    *,
    cut: bool = False,
    split: PositionSplit | None = None,
) -> Kernels:
    """The kernels of a resolved configuration, those that its model `needs`; `dtype` is its type.

    Each one that is not torch's own is compared with torch's on small data first. `cut`: the
    schedule cuts sequences into slices. `split`: attention goes by blocks of positions that are
    split so. Raises :class:`ConfigError` where a kernel is asked for by name and cannot be used.
    """
    wanted = config.kernels
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
            found["attention"] = _attention(wanted.attention, attended)
        else:
            found["attention_tile"] = blocks = _of_blocks(config, attended, split)
            if attended.documents:
                found["packed_attention_tile"] = _of_packs(
                    _on_a_rank(attended, split), blocks.kernel
                )
    if needs.norm is not None:
        norms = norm.candidates(
            device=device, dtype=dtype, **needs.norm._asdict(), compiled=wanted.compile
        )
        found["norm"] = choose_kernel("norm", wanted.norm, norms)
    products = weight_grad.candidates(device=device, dtype=dtype)
    found["accumulate"] = choose_kernel("weight_grad", wanted.weight_grad, products)
    if needs.experts:
        of_experts = grouped.candidates(device=device, dtype=dtype, widths=needs.experts)
        found["experts"] = choose_kernel("experts", wanted.experts, of_experts)
        around = expert_rows.candidates(device=device, dtype=dtype)
        found["moe_elementwise"] = choose_kernel("expert_rows", wanted.expert_rows, around)
    if needs.rotary:
        turns = rotary.candidates(device=device, dtype=dtype, compiled=wanted.compile)
        found["rotary"] = choose_kernel("rotary", wanted.rotary, turns)
    if needs.loss:
        losses = loss.candidates(device=device, dtype=dtype)
        found["loss"] = choose_kernel("loss", wanted.loss, losses)
    if needs.gate:
        gates = swiglu.candidates(device=device, dtype=dtype, compiled=wanted.compile)
        found["swiglu"] = choose_kernel("swiglu", wanted.swiglu, gates)
    used = list(found.values())
    if wanted.compile:
        used.append(KernelChoice("blocks", "compiled", "torch.compile", torch_compile))
    updates = adam.candidates(device=device, dtype=main)
    updated = found["adam"] = choose_kernel("optimizer", wanted.optimizer, updates)
    if declaration(config.optimizer.rule).takes_kernel:
        used.append(updated)
    return Kernels(
        **{purpose: choice.kernel for purpose, choice in found.items()},
        choices=used,
        compiler=torch_compile if wanted.compile else None,
        loss_chunk=config.loss_tokens(cuda=device.type == "cuda"),
        overlap=wanted.overlap,
    )


def _of_blocks(
    config: Config, given: AttentionShape, split: PositionSplit
) -> KernelChoice[TileKernel]:
    """The kernel of blocks; the banner says why there are any, and how they are split."""
    of_rank = _on_a_rank(given, split)
    if of_rank.scores.plain:
        choice = choose_kernel("attention", config.kernels.attention, block_candidates(of_rank))
    else:
        why = "scores that no kernel with sums of exponentials has"
        choice = KernelChoice[TileKernel]("attention", "explicit", why, MathTile())
    reasons = ["activations.keep_attention" if split.cp == 1 else f"parallel.cp={split.cp}"]
    reasons += [f"heads over {split.ulysses}"] if split.ulysses > 1 else []
    context = config.context
    reasons += [f"{context.plan} of {split.ring}, {context.order}"] if split.ring > 1 else []
    why = "; ".join([", ".join(reasons), *([choice.why] if choice.why else [])])
    return replace(choice, name=f"{choice.name} by blocks", why=why)


def _of_packs(of_rank: AttentionShape, blocks: TileKernel) -> KernelChoice[PackedTileKernel | None]:
    """The kernel of many blocks at once, that goes with the one of blocks."""
    choice = choose_kernel("attention", "auto", packed_candidates(of_rank, blocks))
    return replace(choice, purpose="documents")


def _on_a_rank(given: AttentionShape, split: PositionSplit) -> AttentionShape:
    """A block of the attention of a run, whose positions are `split`."""
    return replace(
        given,
        heads=given.heads // split.ulysses,
        groups=max(1, given.groups // split.ulysses),
        length=given.length // split.ring,
        documents=False,
        cut=False,
        compiled=False,
    )


def _attention(wanted: str, given: AttentionShape) -> KernelChoice[AttentionKernel]:
    """The kernel; where that is SDPA, the banner says what torch itself will choose."""
    choice = choose_kernel("attention", wanted, attention_choice.candidates(given))
    if choice.name != "SDPA":
        return choice
    if given.written_out:
        return replace(choice, name="explicit", why="scores that no kernel of torch has here")
    backend = torch_choice(given)
    reasons = [choice.why] if choice.why else []
    if backend != "flash":
        try:
            torch_choice(given, "flash")
        except Unavailable as reason:
            reasons.append(f"flash: {reason}")
    return replace(choice, name=backend, why="; ".join(["SDPA", *reasons]))
