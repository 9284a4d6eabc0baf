"""A whole run: data, steps, validation, checkpoints, reports."""

from __future__ import annotations

import datetime
import json
import math
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from megapipe.checkpoint.retention import retain
from megapipe.checkpoint.writer import Meta, save
from megapipe.cli import dump, flatten
from megapipe.config import Config
from megapipe.data.batch import build_batches
from megapipe.data.own import OwnData, is_own, own_data
from megapipe.data.prepare import Prepared, prepare
from megapipe.data.tokenizer import Tokenizer
from megapipe.distributed.agreement import all_or_none
from megapipe.distributed.mesh import ParallelMesh
from megapipe.engine.recorder import timeline
from megapipe.errors import ConfigError, DataError, MegapipeError, Preempted
from megapipe.launch.signals import StopRequest
from megapipe.layout.checks import shortened
from megapipe.layout.devices import peak
from megapipe.layout.layout import Layout
from megapipe.observe.observer import Observer, build_sinks
from megapipe.observe.profile import StepProfile
from megapipe.observe.provenance import provenance, start_mark
from megapipe.observe.record import StepRecord, ValidationRecord
from megapipe.observe.summary import Summary
from megapipe.observe.timeline import write_timeline
from megapipe.train import changes, checkpoint_io
from megapipe.train.auto import AutoSchedule
from megapipe.train.changes import Change, Changes
from megapipe.train.garbage import Garbage
from megapipe.train.kernels import agreed_kernels
from megapipe.train.resume import check_end, choose, load
from megapipe.train.step import Position, TrainStep
from megapipe.train.totals import Wishes
from megapipe.train.update import StepResult
from megapipe.words import counted

CORPUS_PATIENCE = datetime.timedelta(days=7)
"""How long the other processes wait for one of their node to tokenize a corpus."""
SMOOTHING = 0.9
"""Weight of the past in the time per step behind the ETA."""


class Trainer:
    """Runs `config` on this process' part of the mesh.

    `local_rank` 0 asks for the corpus for its node, once everything that can be known to be wrong
    without it is known; of those that share a cache one prepares it. `stop` ends it after a step.
    Raises a :class:`MegapipeError` on every rank when any rank meets one while setting up, a
    failing compiler excepted (:func:`~megapipe.train.kernels.agreed_kernels`).
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        mesh: ParallelMesh,
        tokenizer: Tokenizer,
        *,
        local_rank: int,
        stop: StopRequest,
    ) -> None:
        self.config = config
        self.layout = layout
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.stop = stop
        self.clock = Clock(60 * config.checkpoint.every_minutes)
        self.folder = Path(config.run.folder) / config.run.name
        self.checkpoints = self.folder / "checkpoints"
        self._make_folder()
        self.source = choose(config, self.checkpoints, mesh)
        check_end(self.source, config)
        self._changes(corpus=None)
        kernels = agreed_kernels(config, layout, mesh, layout.schedule)
        self.prepared = self._prepare(local_rank)
        self.changes = self._changes(corpus=self._change_of_corpus())
        self.training, self.validation = build_batches(config, tokenizer, self.prepared)
        self.train_step = TrainStep(
            config, layout, mesh, kernels=kernels, document_end=tokenizer.eod
        )
        self.first_step = 0
        self.skipped = 0
        """Steps since step 0 that fp16 made without an update."""
        self.run_id = mesh.share(uuid.uuid4().hex)
        if self.source.checkpoint is not None:
            load(self.source.checkpoint, config, self.train_step, mesh)
            self.first_step = self.source.checkpoint.step
            if self.changes.data_anew:
                self.train_step.position = Position(self.first_step, 0)
            self.skipped = self.first_step - self.train_step.optimizer.count
            if self.source.is_own:
                self.run_id = self.source.checkpoint.manifest.run_id
        self.observer = self._open_run_folder() if mesh.rank == 0 else None
        self.validation_loss = float("nan")

    def _make_folder(self) -> None:
        """The run folder, before anything takes time."""
        error = None
        if self.mesh.rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as problem:
                error = ConfigError(f"run.folder: cannot make {self.folder}: {problem.strerror}")
        all_or_none(self.mesh, error)

    def _prepare(self, local_rank: int) -> Prepared | OwnData:
        """The corpus, asked for by one process of each node at first."""
        prepared, error = None, None
        for turn in (local_rank == 0, local_rank != 0):
            if turn:
                try:
                    prepared = self._corpus()
                except MegapipeError as problem:
                    error = problem
            self.mesh.await_all(CORPUS_PATIENCE)
            all_or_none(self.mesh, error)
        assert prepared is not None
        if isinstance(prepared, OwnData):
            self._compare_ranks(prepared)
        return prepared

    def _corpus(self) -> Prepared | OwnData:
        if is_own(self.config.data.source):
            return own_data(self.config, self.tokenizer)
        return prepare(self.config.data, self.tokenizer, progress=self.mesh.rank == 0)

    def _compare_ranks(self, data: OwnData) -> None:
        """Raise on every rank if the user's code has made another data set on one than on rank
        0."""
        error = None
        if data.content != self.mesh.share(data.content):
            error = DataError(
                f"data.source={self.config.data.source}: rank {self.mesh.rank} has other samples "
                "than rank 0: expected the same in every process and at every call"
            )
        all_or_none(self.mesh, error)

    def _changes(self, corpus: Change | None) -> Changes:
        """Changes since the checkpoint; raises for what cannot go on."""
        checkpoint = self.source.checkpoint
        if checkpoint is None:
            return Changes()
        return changes.check(checkpoint, self.config, own=self.source.is_own, corpus=corpus)

    def _change_of_corpus(self) -> Change | None:
        """None where the checkpoint's corpus came out as this one, whatever its name."""
        if self.source.checkpoint is None:
            return None
        manifest, prepared = self.source.checkpoint.manifest, self.prepared
        stored = manifest.digests
        if prepared.digest == stored.get("corpus") or prepared.content == stored.get("content"):
            return None
        before = f"{manifest.config.get('data.source')} ({stored.get('content', 'unknown')[:8]})"
        return Change("corpus", before, f"{self.config.data.source} ({prepared.content[:8]})")

    def _open_run_folder(self) -> Observer:
        """Record what runs: configuration, versions, git state."""
        mark = start_mark(self.folder, self.first_step) if self.source.is_own else ""
        try:
            (self.folder / f"config{mark}.yaml").write_text(dump(self.config))
            origin = provenance(Path(__file__).resolve().parents[2])
            text = json.dumps(origin, indent=2) + "\n"
            (self.folder / f"provenance{mark}.json").write_text(text)
        except OSError as error:
            raise ConfigError(
                f"run.folder: cannot write to {self.folder}: {error.strerror}"
            ) from None
        return build_sinks(self.config, self.folder, flatten(self.config))

    def run(self) -> None:
        """Train to ``train.stop_after`` or the end. Raises :class:`Preempted` after saving if asked
        to stop."""
        with Garbage(self.config.run.collect_every) as garbage:
            self._run(garbage)

    def _run(self, garbage: Garbage) -> None:
        steps, end = self.config.train.steps, self.config.train.last_step
        self._note(self._banner())
        kernels = self.train_step.kernels
        for line in (kernels.banner(), *kernels.warnings(), *shortened(self.config)):
            self._note(line)
        for reason in self.source.skipped:
            self._note(f"passed over a damaged checkpoint: {reason}")
        if self.source.checkpoint is not None:
            path = self.source.checkpoint.path
            at = f"step {self.first_step} of {steps}, sample {self.train_step.position.samples}"
            self._note(f"resumed from {path} at {at}")
            for change in self.changes.told:
                self._note(f"changed since: {change}")
        auto = self._auto_schedule()
        self.stop.phase = "training"
        self.clock.restart()
        began = time.perf_counter()
        losses: list[float] = []
        pace = None
        for step in range(self.first_step, end):
            profile = self._begin_profile(step + 1)
            drawn = step + 1 in self.config.log.timeline
            recorded = drawn or (auto is not None and auto.recording)
            last = step + 1 == end
            validate = last or _due(self.config.train.validate_every, step + 1)
            save = last or _due(self.config.checkpoint.every, step + 1)
            results = self.train_step.train(
                step,
                self.training.rows,
                record=recorded,
                name=profile is not None,
                # what is under way when a profile ends writes into what is no more
                settle=validate or save or profile is not None,
                wishes=self._wishes,
            )
            stop = any(result.wishes.stop for result in results)
            save |= any(result.wishes.save for result in results)
            if profile is not None:
                self._end_profile(profile, step + 1)
            for result in results:
                losses.append(result.loss)
                skipped = not math.isfinite(result.grad_norm)
                self.skipped += skipped
                seconds = result.seconds
                pace = seconds if pace is None else SMOOTHING * pace + (1 - SMOOTHING) * seconds
                self._report(result, pace)
                if skipped:
                    self._note(
                        f"step {result.step + 1} is skipped: gradients are not finite at loss "
                        f"scale {result.loss_scale:g}, which is halved"
                    )
            garbage.after(step + 1)
            if drawn:
                self._draw_timeline(step + 1)
            if auto is not None:
                auto.after(results[-1].seconds, recorded=recorded)
            if validate and not stop:
                stop = self._validate(step + 1)
            if save or stop:
                self._save(step + 1)
            if stop:
                self.stop.phase = "leaving"
                raise Preempted(f"stopped by a signal; saved step {step + 1} of {steps}")
        if end < steps:
            self._note(
                f"ended after step {end} of {steps}, as train.stop_after says; start again with "
                "more, or null, to go on"
            )
        self.stop.phase = "leaving"
        if losses:
            self._summarise(losses, time.perf_counter() - began)

    def _banner(self) -> str:
        """The banner: what runs, where, and whether it could run again bit for bit."""
        config, layout, mesh = self.config, self.layout, self.mesh
        tokens = config.train.global_batch * config.train.sequence_length
        exact = mesh.device.type == "cpu" or config.run.deterministic
        grid = f"pp {layout.pp} x dp {layout.dp} x cp {layout.cp} x tp {layout.tp}"
        parts = (
            f"{layout.model.count():,} parameters, {config.model.dtype}",
            f"{grid}, {counted(mesh.world, 'process')} on {mesh.device.type} with {mesh.backend}",
            f"{config.optimizer.rule}, ZeRO-{self.train_step.optimizer.policy.stage}",
            f"{self.train_step.schedule.name} of {counted(layout.microbatches, 'micro-batch')}",
            f"{counted(config.train.steps, 'step')} of {counted(tokens, 'token')}",
            "bitwise reproducible" if exact else "not bitwise reproducible (run.deterministic)",
        )
        return " | ".join(parts)

    def _note(self, text: str) -> None:
        if self.observer is not None:
            self.observer.note(text)

    def _report(self, result: StepResult, pace: float) -> None:
        if self.observer is None:
            return
        step, seconds = result.step + 1, result.seconds
        train, device = self.config.train, self.mesh.device
        tokens = train.global_batch * train.sequence_length
        flops = tokens * self.layout.model.token_flops()
        tflops = flops / seconds / self.mesh.world / 1e12
        limit = self.config.log.peak_tflops
        if limit is None and device.type == "cuda":
            limit = peak(torch.cuda.get_device_name(device))
        self.observer.step(
            StepRecord(
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
                samples=self.train_step.samples(step),
                loss_scale=result.loss_scale if self.train_step.scaler.scales else None,
                skipped=self.skipped if self.train_step.scaler.scales else None,
            )
        )

    def _auto_schedule(self) -> AutoSchedule | None:
        if self.config.pipeline.schedule != "auto":
            return None
        return AutoSchedule(
            self.config,
            self.layout,
            self.train_step,
            self.mesh,
            self.folder,
            self._note,
            resumed=self.source.is_own,
        )

    def _begin_profile(self, step: int) -> StepProfile | None:
        if step not in self.config.log.profile:
            return None
        mesh = self.mesh
        place = f"pp {mesh.pp.index} dp {mesh.dp.index} tp {mesh.tp.index}"
        on_gpu = mesh.device.type == "cuda"
        profile = StepProfile(self.folder, step, rank=mesh.rank, place=place, on_gpu=on_gpu)
        profile.start()
        mesh.barrier()
        return profile

    def _end_profile(self, profile: StepProfile, step: int) -> None:
        problem = None
        try:
            profile.stop()
        except OSError as error:
            problem = f"rank {self.mesh.rank}: {error}"
        problem = self.mesh.agree(problem)
        if problem is not None:
            self._note(f"no whole profile of step {step}: {problem}")
        else:
            self._note(
                f"profile of step {step}: a trace per rank in {profile.folder}; python -m "
                f"megapipe.observe.profile {profile.folder} makes one of them"
            )

    def _draw_timeline(self, step: int) -> None:
        records = self.train_step.records()
        if self.observer is None:
            return
        try:
            measured = timeline(self.train_step.schedule, records)
            self._note(write_timeline(self.folder, step, measured, self.layout.cost))
        except OSError as error:
            self._note(f"no timeline of step {step}: {error}")

    def _wishes(self) -> Wishes:
        """This rank's requests to all at the end of a step; one clock decides when to save."""
        return Wishes(bool(self.stop), save=self.mesh.rank == 0 and self.clock.due)

    def _validate(self, step: int) -> bool:
        """Report on held-out text. Returns whether that was stopped by a signal."""
        start = time.perf_counter()
        samples = len(self.validation)
        if self.config.train.validation_samples is not None:
            samples = min(samples, self.config.train.validation_samples)
        found = self.train_step.evaluate(
            self.validation.rows, samples, stop=lambda: bool(self.stop)
        )
        if found.stopped:
            return True
        self.validation_loss = found.loss
        if self.observer is not None:
            seconds = time.perf_counter() - start
            self.observer.validation(
                ValidationRecord(step, self.config.train.steps, self.validation_loss, seconds)
            )
        return False

    def _save(self, step: int) -> None:
        layout = self.layout
        sizes = {name: getattr(layout, name) for name in ("pp", "dp", "cp", "tp", "chunks")}
        coordinates: dict[str, Any] = {
            "step": step,
            "samples": self.train_step.samples(step),
            **self.train_step.coordinates(),
        }
        meta = Meta(
            run_id=self.run_id,
            layout=sizes,
            coordinates=coordinates,
            config=flatten(self.config),
            digests={"corpus": self.prepared.digest, "content": self.prepared.content},
        )
        path = save(
            self.checkpoints,
            step=step,
            pieces=checkpoint_io.pieces(self.train_step.optimizer),
            meta=meta,
            group=self.mesh,
        )
        self._note(f"saved {path}")
        error = None
        if self.mesh.rank == 0:
            try:
                retain(self.checkpoints, self.config.checkpoint.keep, path)
            except MegapipeError as problem:
                error = problem
        all_or_none(self.mesh, error)
        self.clock.restart()

    def _summarise(self, losses: list[float], seconds: float) -> None:
        if self.mesh.rank != 0:
            return
        train = self.config.train
        tokens = len(losses) * train.global_batch * train.sequence_length
        summary = Summary(
            loss_first=losses[0],
            loss_last=losses[-1],
            validation_loss=self.validation_loss,
            unigram_entropy=self.prepared.entropy,
            tokens_per_second=tokens / seconds,
            run_folder=str(self.folder),
            steps=len(losses),
            seconds=seconds,
        )
        (self.folder / "summary.json").write_text(summary.model_dump_json(indent=2) + "\n")

    def close(self) -> None:
        """Flush and close the reports."""
        if self.observer is not None:
            self.observer.close()


class Clock:
    """Says when `seconds` have passed; 0: never."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Begin to wait."""
        self._began = time.monotonic()

    @property
    def due(self) -> bool:
        return 0 < self._seconds <= time.monotonic() - self._began


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
