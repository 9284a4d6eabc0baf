"""The kernels of a run, the same on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from megapipe.assembly.context import make_context
from megapipe.assembly.sharding import make_sharding
from megapipe.command_line import phase
from megapipe.config import Config
from megapipe.context.split import Split
from megapipe.distributed.agreement import all_or_none
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import LaunchError, MegapipeError
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.layout.layout import Layout
from megapipe.model.kernel_needs import KernelNeeds
from megapipe.ops import (
    adam,
    attention_choice,
    expert_rows,
    grouped,
    loss,
    norm,
    rotary,
    swiglu,
    weight_grad,
)
from megapipe.ops.attention import AttentionKernel
from megapipe.ops.attention_choice import Attended, torch_choice
from megapipe.ops.block_attention import BlockKernel, Explicit
from megapipe.ops.block_choice import block_candidates, packed_candidates
from megapipe.ops.compiler import torch_compile
from megapipe.ops.kernels import Kernels
from megapipe.ops.packed_kernels import PackedKernel
from megapipe.ops.probe import Choice, Unavailable, choose
from megapipe.schedule.ir import Schedule
from megapipe.update_rules import declaration


def agreed_kernels(
    config: Config, layout: Layout, mesh: ParallelMesh, schedule: Schedule
) -> Kernels:
    """This process' kernels for a run of `schedule`, checked, compiled blocks included.

    Raises on every rank if one cannot use a kernel that is asked for by name, or
    :class:`LaunchError` if one would use other kernels than rank 0, as where a package is missing.
    A rank whose compiler fails raises alone: its tp peers may be in a collective of the block.
    """
    kernels = _selected(config, layout, mesh, cut=schedule.slices > 1)
    if kernels.blocks is not None:
        kernels = replace(
            kernels, context=make_context(layout, mesh, kernels.blocks, kernels.packed)
        )
    if kernels.compiler is not None:
        rows = config.train.microbatch
        sizes = map(schedule.size_of, range(schedule.microbatches))
        split, length = layout.split, config.train.sequence_length
        what = "compiling blocks, as kernels.compile=true asks for"
        with phase(what, in_logs=True) if mesh.rank == 0 else nullcontext():
            layout.model.check_compiled(
                make_sharding(config, mesh, kernels),
                rows={rows, *(int(size * rows) for size in sizes)},  # whole ones: validation
                again=bool(schedule.recompute)
                or any(span.policy.recompute for span in chain(*layout.spans)),
                documents=config.data.masks_documents,
                device=mesh.device,
                held=None if split.cp == 1 else split.held([length], mesh.cp.index),
            )
    return kernels


def select_kernels(
    config: Config,
    needs: KernelNeeds,
    device: torch.device,
    dtype: torch.dtype,
    *,
    cut: bool = False,
    split: Split | None = None,
) -> Kernels:
    """The kernels of a resolved configuration, those that its model `needs`; `dtype` is its type.

    Each one that is not torch's own is compared with torch's on small data first. `cut`: the
    schedule cuts sequences into slices. `split`: attention goes by blocks of positions that are
    split so. Raises :class:`ConfigError` where a kernel is asked for by name and cannot be used.
    """
    wanted = config.kernels
    main = torch.float64 if dtype == torch.float64 else torch.float32
    found: dict[str, Choice[Any]] = {}
    if needs.attention is not None:
        attended = Attended(
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
            found["blocks"] = blocks = _of_blocks(config, attended, split)
            if attended.documents:
                found["packed"] = _of_packs(_on_a_rank(attended, split), blocks.kernel)
    if needs.norm is not None:
        norms = norm.candidates(
            device=device, dtype=dtype, **needs.norm._asdict(), compiled=wanted.compile
        )
        found["norm"] = choose("norm", wanted.norm, norms)
    products = weight_grad.candidates(device=device, dtype=dtype)
    found["accumulate"] = choose("weight_grad", wanted.weight_grad, products)
    if needs.experts:
        of_experts = grouped.candidates(device=device, dtype=dtype, widths=needs.experts)
        found["experts"] = choose("experts", wanted.experts, of_experts)
        around = expert_rows.candidates(device=device, dtype=dtype)
        found["rows"] = choose("expert_rows", wanted.expert_rows, around)
    if needs.rotary:
        turns = rotary.candidates(device=device, dtype=dtype, compiled=wanted.compile)
        found["rotary"] = choose("rotary", wanted.rotary, turns)
    if needs.loss:
        losses = loss.candidates(device=device, dtype=dtype)
        found["loss"] = choose("loss", wanted.loss, losses)
    if needs.gate:
        gates = swiglu.candidates(device=device, dtype=dtype, compiled=wanted.compile)
        found["swiglu"] = choose("swiglu", wanted.swiglu, gates)
    used = list(found.values())
    if wanted.compile:
        used.append(Choice("blocks", "compiled", "torch.compile", torch_compile))
    updates = adam.candidates(device=device, dtype=main)
    updated = found["adam"] = choose("optimizer", wanted.optimizer, updates)
    if declaration(config.optimizer.rule).takes_kernel:
        used.append(updated)
    return Kernels(
        **{purpose: choice.kernel for purpose, choice in found.items()},
        choices=used,
        compiler=torch_compile if wanted.compile else None,
        loss_chunk=config.loss_tokens(cuda=device.type == "cuda"),
        overlap=wanted.overlap,
    )


def _selected(config: Config, layout: Layout, mesh: ParallelMesh, *, cut: bool) -> Kernels:
    """Kernels that are usable here, if all ranks agree; on CPUs there is no choice. `cut`:
    sequences come in slices."""
    given = config, layout.model.kernels, mesh.device, TORCH_DTYPES[config.model.dtype]
    split = layout.split if layout.attends_by_blocks else None
    if mesh.device.type == "cpu":
        return select_kernels(*given, cut=cut, split=split)
    kernels, error = Kernels(), None
    try:
        kernels = select_kernels(*given, cut=cut, split=split)
    except MegapipeError as problem:
        error = problem
    own = ", ".join(f"{choice.purpose} {choice.name}" for choice in kernels.choices)
    first = mesh.share(own)
    if error is None and own != first:
        error = LaunchError(
            f"rank {mesh.rank} would use the kernels {own}, and rank 0 {first}: install the same "
            "packages on every node, or name the kernels (kernels.*)"
        )
    all_or_none(mesh, error)
    return kernels


def _of_blocks(config: Config, given: Attended, split: Split) -> Choice[BlockKernel]:
    """The kernel of blocks; the banner says why there are any, and how they are split."""
    of_rank = _on_a_rank(given, split)
    if of_rank.scores.plain:
        choice = choose("attention", config.kernels.attention, block_candidates(of_rank))
    else:
        why = "scores that no kernel with sums of exponentials has"
        choice = Choice[BlockKernel]("attention", "explicit", why, Explicit())
    reasons = ["activations.keep_attention" if split.cp == 1 else f"parallel.cp={split.cp}"]
    reasons += [f"heads over {split.ulysses}"] if split.ulysses > 1 else []
    context = config.context
    reasons += [f"{context.plan} of {split.ring}, {context.order}"] if split.ring > 1 else []
    why = "; ".join([", ".join(reasons), *([choice.why] if choice.why else [])])
    return replace(choice, name=f"{choice.name} by blocks", why=why)


def _of_packs(of_rank: Attended, blocks: BlockKernel) -> Choice[PackedKernel | None]:
    """The kernel of many blocks at once, that goes with the one of blocks."""
    choice = choose("attention", "auto", packed_candidates(of_rank, blocks))
    return replace(choice, purpose="documents")


def _on_a_rank(given: Attended, split: Split) -> Attended:
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


def _attention(wanted: str, given: Attended) -> Choice[AttentionKernel]:
    """The kernel; where that is SDPA, the banner says what torch itself will choose."""
    choice = choose("attention", wanted, attention_choice.candidates(given))
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
