"""The first lines that a run prints: what runs, on which devices and kernels, from which step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megapipe.checkpoint.durable import writable_by_others
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.storage import StorageLocation
from megapipe.config.strict_yaml import text_of
from megapipe.layout.checks import passed, shortened
from megapipe.optim.lr import learning_rate
from megapipe.plan.report import changed_by_experts, met_by_a_token
from megapipe.text import count_noun
from megapipe.train.callbacks.callback import Run
from megapipe.train.resume.changes import Change, Changes
from megapipe.train.resume.coordinates import ResumePoint
from megapipe.train.start_point import StartPoint


def banner_lines(run: Run, source: StartPoint, changes: Changes) -> Iterator[str]:
    """Yield the first lines of a run that begins from `source`, in order."""
    yield banner(run)
    kernels = run.train_step.kernels
    yield from (kernels.banner(), *kernels.warnings(), *shortened(run.config))
    yield from source.notes()
    if source.checkpoint is not None:
        samples = run.train_step.skipped_samples.number_after(run.train_step.position.samples)
        at = f"step {run.first_step} of {run.config.train.steps}, sample {samples}"
        where = "the in-memory checkpoint " if source.in_memory else ""
        yield f"resumed from {where}{source.checkpoint.path} at {at}"
        for change in changes.to_report:
            yield f"changed since: {change}"
        yield from _of_decay(run, changes.to_report)
        yield from passed(run.config.log, run.first_step)
        yield from _of_checkpoint(run, source.checkpoint, is_own=source.is_own)
        streaming = run.train_step.streaming
        if streaming is not None and not streaming.continues:
            yield (
                f"pipeline.weight_versions={run.config.pipeline.weight_versions}: the "
                "pipeline restarts with the weights of the checkpoint"
            )
    if source.weights is not None:
        yield f"starts with the weights of {source.weights.path}"
        for change in changes.to_report:
            now, stored = map(text_of, (change.now, change.stored))
            yield (
                f"trains with {change.key}={now}, where {source.weights.path} has {stored}: set "
                f"{change.key}={stored} to train with that"
            )
        yield from _of_others(run, source.weights.path)


def _of_decay(run: Run, changes: Sequence[Change]) -> Iterator[str]:
    """Yield a line if changed settings (more steps, say) raise a learning rate that had decayed."""
    before = {change.key: change.stored for change in changes}
    now, steps = run.config.optimizer, run.config.train.steps
    keys = type(now).model_fields.keys()
    old = now.model_copy(
        update={key: before[f"optimizer.{key}"] for key in keys if f"optimizer.{key}" in before}
    )
    reshaped = before.keys() & {"train.steps", "optimizer.schedule", "optimizer.decay_steps"}
    if not reshaped or run.first_step == 0 or old.is_user_schedule or now.is_user_schedule:
        return
    old_steps = before.get("train.steps", steps)
    last = learning_rate(old, run.first_step - 1, old_steps)
    following = learning_rate(now, run.first_step, steps)
    decays = run.first_step > old.warmup(old_steps) and last < old.lr
    if decays and following > last:
        peak = "its peak" if following == now.lr else f"of a peak of {now.lr:g}"
        yield (
            f"optimizer.schedule={now.schedule}: the learning rate had decayed to {last:g} by "
            f"step {run.first_step}, and returns to {following:g}, {peak}, in the next step"
        )


def _of_checkpoint(run: Run, checkpoint: Checkpoint, *, is_own: bool) -> Iterator[str]:
    """Yield warnings for a run that resumes: ignored settings, other threads, unsafe files."""
    load = run.config.checkpoint.load
    if is_own and load is not None:
        yield f"checkpoint.load={load} is ignored: the run already has checkpoints"
    before, now = ResumePoint.of(checkpoint).threads, torch.get_num_threads()
    if run.mesh.device.type == "cpu" and before not in (0, now):
        yield (
            f"threads of a process (OMP_NUM_THREADS) were {before} and are {now}: sums differ "
            "in their last bits from an uninterrupted run"
        )
    yield from _of_others(run, checkpoint.path)


def _of_others(run: Run, path: StorageLocation) -> Iterator[str]:
    """Yield a line if another user can change the checkpoint or weights at `path`."""
    if (
        run.mesh.rank == 0
        and isinstance(path, Path)
        and (doubt := writable_by_others(path)) is not None
    ):
        yield f"{doubt}: that user can change what this run trains on"


def banner(run: Run) -> str:
    """Describe model, mesh, optimizer, schedule, steps, and whether the run is reproducible."""
    config, layout, mesh = run.config, run.layout, run.mesh
    *_, final = sizes = config.train.batches.sizes
    tokens = final * config.train.sequence_length
    rising = f", batches from {sizes[0]} on" if len(sizes) > 1 else ""
    exact = config.run.exact_on(mesh.device.type)
    grid = f"pp {layout.pp} x dp {layout.dp} x cp {layout.cp} x tp {layout.tp}"
    if layout.ep_ranks > 1:
        grid += f" (experts over ep {layout.ep} x etp {layout.etp}{changed_by_experts(config)})"
    model, rank = layout.model, config.lora.rank
    trained = (
        "" if rank is None else f", {model.num_parameters(trained=True):,} of rank {rank} trained"
    )
    order = (layout.async_schedule or run.train_step.schedule).name
    parameters = f"{model.num_parameters():,} parameters{met_by_a_token(model)}{trained}"
    parts = (
        f"{parameters}, {config.model.dtype}",
        f"{grid}, {count_noun(mesh.world, 'process')} on {mesh.device.type} with {mesh.backend}",
        f"{config.optimizer.rule}, ZeRO-{layout.replicas.zero}",
        f"{order} of {count_noun(layout.microbatches, 'micro-batch')}",
        f"{count_noun(config.train.steps, 'step')} of {count_noun(tokens, 'token')}{rising}",
        "bitwise reproducible" if exact else "not bitwise reproducible (run.deterministic)",
    )
    return " | ".join(parts)
