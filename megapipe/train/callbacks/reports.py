"""Reports: a record of every step and validation for the console and the logs, and the summary."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from megapipe.data.batch import Batches
from megapipe.layout.devices import peak
from megapipe.observe.record import SourceRecord, StepRecord, ValidationRecord
from megapipe.observe.summary import Summary
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.callbacks.stragglers import StragglerWatch
from megapipe.train.moe import routing_stats
from megapipe.train.update import StepResult
from megapipe.util.no_symlinks import write_no_symlinks

SMOOTHING = 0.9
"""Weight of the past in the smoothed time per step, for the ETA."""


class Reports(Callback):
    """Reports steps as their results become known.

    `skipped`: number of earlier steps without an update. `entropy`: unigram entropy of the corpus
    in nats, if known. `training`: batches of the steps. `stragglers` scores the ranks, so it must
    be called before this callback.
    """

    def __init__(
        self,
        *,
        skipped: int,
        entropy: float | None,
        training: Batches | None = None,
        stragglers: StragglerWatch | None = None,
    ) -> None:
        self._skipped = skipped
        self._entropy = entropy
        self._training = training
        self._stragglers = stragglers
        self._losses: list[float] = []
        self._tokens = 0
        self._validation_loss: float | None = None
        self._held_out: dict[str, float] = {}
        """Last loss of each named validation set and of each test, by label."""
        self._pace: float | None = None
        """Seconds per step, smoothed."""

    def begin(self, run: Run) -> None:
        self._began = time.perf_counter()

    def after_step(self, run: Run, step: Step) -> None:
        for result in step.results:
            self._losses.append(result.loss)
            self._skipped += result.skipped is not None
            pace = self._smoothed(result.seconds)
            if run.observer is not None:
                record = self._record(run, result, pace)
                last = result is step.results[-1]
                run.observer.step(self._scored(record) if last else record)
            if result.note is not None:
                run.note(result.note)
            if result.skipped is not None:
                run.note(f"step {result.step + 1} is skipped: {result.skipped}")

    def _scored(self, record: StepRecord) -> StepRecord:
        """Return the record, with the largest straggler score if there is a new one."""
        slowest = None if self._stragglers is None else self._stragglers.slowest
        if slowest is None:
            return record
        return replace(record, straggler_rank=slowest.rank, straggler_score=slowest.value)

    def after_rewind(self, run: Run, step: int) -> None:
        self._skipped = step - run.train_step.optimizer.count

    def _smoothed(self, seconds: float) -> float:
        before = self._pace
        self._pace = seconds if before is None else SMOOTHING * before + (1 - SMOOTHING) * seconds
        return self._pace

    def _record(self, run: Run, result: StepResult, pace: float) -> StepRecord:
        step, seconds = result.step + 1, result.seconds
        train, samples = run.config.train, run.train_step.samples
        tokens = (samples(step) - samples(step - 1)) * train.sequence_length
        self._tokens += tokens
        flops = tokens * run.layout.model.token_flops()
        tflops = flops / seconds / run.mesh.world / 1e12
        limit = _peak(run)
        skips = run.train_step.scaler.scales or run.config.health.skips
        every = run.config.log.expert_counts_every
        return StepRecord(
            step=step,
            steps=train.steps,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            seconds=seconds,
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            tflops_per_device=tflops,
            mfu=None if limit is None else tflops / limit,
            memory_gib=result.memory_gib,
            eta_seconds=pace * (train.last_step - step),
            samples=samples(step),
            loss_scale=result.loss_scale if run.train_step.scaler.scales else None,
            skipped_steps=self._skipped if skips else None,
            sources=self._sources(run, result, samples(step)),
            routing=routing_stats.record(
                run.layout.model.experts(),
                result.routing,
                result.figures.get("max_bias"),
                counts=every > 0 and (step % every == 0 or step == train.last_step),
            ),
        )

    def _sources(
        self, run: Run, result: StepResult, samples: int
    ) -> dict[str, SourceRecord] | None:
        training = self._training
        if training is None or training.mixture is None:
            return None
        taken = run.train_step.skipped_samples.counts(training.taken, samples)
        parts = zip(training.names, result.by_source, taken, strict=True)
        return {name: SourceRecord(sum_.loss, sum_.tokens, count) for name, sum_, count in parts}

    def after_validation(self, run: Run, record: ValidationRecord) -> None:
        if record.name or record.split == "test":
            self._held_out[record.label] = record.loss
        else:
            self._validation_loss = record.loss
        if run.observer is not None:
            run.observer.validation(record)

    def end(self, run: Run) -> None:
        """Write the summary."""
        if run.mesh.rank != 0 or not self._losses:
            return
        seconds = time.perf_counter() - self._began
        summary = Summary(
            loss_first=self._losses[0],
            loss_last=self._losses[-1],
            validation_loss=self._validation_loss,
            held_out=self._held_out,
            unigram_entropy=self._entropy,
            tokens_per_second=self._tokens / seconds,
            run_folder=str(run.folder),
            steps=len(self._losses),
            seconds=seconds,
        )
        path = run.folder / "summary.json"
        try:
            write_no_symlinks(run.folder, path.name, summary.model_dump_json(indent=2) + "\n")
        except OSError as error:  # everything else is saved
            run.note(f"{path} cannot be written: {error.strerror}")

    def close(self, run: Run) -> None:
        if run.observer is not None:
            run.observer.close()


def _peak(run: Run) -> float | None:
    """Return the peak TFLOP/s of a device, if known."""
    limit, device = run.config.plan.peak_tflops, run.mesh.device
    if limit is None and device.type == "cuda":
        return peak(torch.cuda.get_device_name(device))
    return limit
