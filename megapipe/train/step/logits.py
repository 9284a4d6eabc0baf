"""Logits of tokens from a model that is spread over a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megapipe.distributed.collectives import all_gather, all_reduce
from megapipe.engine.stage import Stage
from megapipe.errors import DataError
from megapipe.layers.microbatch import MicroBatch
from megapipe.layout.context_checks import length_multiple
from megapipe.ops.documents import Documents, document_ids, positions_in
from megapipe.schedule.generators import forward_only
from megapipe.train.step.machine import Machine


class _LogitsStage:
    """A last stage that returns its logits instead of the loss."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, x: Any, mb: MicroBatch) -> Tensor:
        return self._module.logits(x, mb)


def compute_logits(machine: Machine, tokens: Tensor, end: int | None) -> Tensor:
    """Compute logits [b, s, V] of `tokens` [b, s], in fp32 (fp64 for fp64), on every rank.

    `end` is the token that ends a document if attention ends at documents.
    """
    mesh, placement = machine.mesh, machine.placement
    tokens = tokens.to(mesh.device)
    ids = None if end is None else document_ids(tokens.cpu(), end)
    split, length = machine.layout.split, tokens.shape[1]
    own_positions = list(split.own(0, length, mesh.cp.index))
    shape = machine.messages.of_size(len(tokens), len(own_positions))
    mb = MicroBatch(
        index=0,
        step=0,
        seed=machine.config.run.seed,
        tokens=tokens[:, own_positions],
        documents=None if ids is None else Documents(ids, mesh.device),
        positions=(
            positions_in(ids)[:, own_positions].t().to(mesh.device)
            if ids is not None and machine.config.resets_positions
            else None
        ),
        local_positions=None if split.cp == 1 else split.local([length], mesh.cp.index),
    )
    schedule = forward_only(placement, 1)
    stages = dict(machine.stages)
    last = placement.stages - 1
    if last in stages:
        module: Any = _LogitsStage(machine.modules[last])
        stages[last] = Stage(module)
    executors = machine.pipeline.executors(
        schedule, stages, machine.optimizer, train=False, shape=shape
    )
    with machine.optimizer.use_master_weights():
        machine.pipeline.run(executors, {(0, 0): mb})
    vocabulary = machine.layout.model.vocab_size
    assert vocabulary is not None
    dtype = torch.float64 if machine.config.model.dtype == "fp64" else torch.float32
    own = stages[last].loss_sums.get((0, 0)) if last in stages else None
    if own is not None:
        columns = own.permute(2, 1, 0).contiguous()  # [V or V/tp, b, s]
        if machine.layout.model.splits_logits(machine.layout.stage_layers[last]):
            columns = all_gather(columns, mesh.tp)
        own = columns[:vocabulary].permute(1, 2, 0).to(dtype).contiguous()
    if mesh.pp.group is None and split.cp == 1:
        assert own is not None
        return own
    whole = torch.zeros(*tokens.shape, vocabulary, dtype=dtype, device=mesh.device)
    if own is not None:
        whole[:, own_positions] = own
    # every position is zero on all ranks except one
    return all_reduce(all_reduce(whole, mesh.cp), mesh.pp)


def check(machine: Machine, tokens: Tensor) -> None:
    """Raise :class:`DataError` for tokens that the model cannot read."""
    longest = machine.config.train.sequence_length
    vocabulary = machine.layout.model.vocab_size
    multiple = length_multiple(machine.config, machine.layout.split)
    if tokens.dim() != 2 or tokens.is_floating_point() or not tokens.numel():
        found = f"{tokens.dtype} of shape {list(tokens.shape)}".removeprefix("torch.")
        raise DataError(f"logits: tokens are {found}: expected whole numbers [samples, tokens]")
    if tokens.shape[1] > longest or tokens.shape[1] % multiple:
        divided = f" and a multiple of {multiple} (parallel.cp, tp)" if multiple > 1 else ""
        raise DataError(
            f"logits: sequences of {tokens.shape[1]} tokens: expected at most "
            f"train.sequence_length={longest}{divided}"
        )
    if vocabulary is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise DataError(
            f"logits: token ids from {int(tokens.min())} to {int(tokens.max())}: expected 0 to "
            f"{vocabulary - 1}"
        )
