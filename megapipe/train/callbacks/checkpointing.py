"""Checkpoints: every given number of steps, by the clock, on request, and at the end."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable

from megapipe.checkpoint.async_save import AsyncSaver
from megapipe.checkpoint.checking import AsyncRemoval, AsyncVerify
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import CheckpointName
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.retention import outdated, remove
from megapipe.checkpoint.storage import StorageLocation
from megapipe.checkpoint.writer import save
from megapipe.data.sources import Sources
from megapipe.errors import CheckpointError
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.callbacks.validation import is_due
from megapipe.train.resume.find import verified
from megapipe.train.run_folder import RunFolder
from megapipe.train.state import SaveArguments
from megapipe.train.step_stats import RankRequests


class Checkpointing(Callback):
    """Saves checkpoints in the run folder, and deletes older ones (``checkpoint.keep``).
    Weights-only checkpoints stay: no run saves them.

    `clock` says when a checkpoint is due by time; rank 0's clock decides. `sound`: checkpoints of
    earlier starts that were verified (intact, all values finite). `failed`: checkpoints that do not
    count towards ``checkpoint.keep``. With `background`, saves are asynchronous: training goes on
    during all saves except the last, and while checkpoints are verified and removed.
    """

    def __init__(
        self,
        folder: RunFolder,
        clock: Clock,
        *,
        run_id: str,
        corpus: Sources,
        order: str,
        sound: Iterable[StorageLocation] = (),
        failed: Iterable[StorageLocation] = (),
        background: AsyncSaver | None = None,
    ) -> None:
        self.folder = folder
        self.checkpoints = folder.checkpoints
        self.clock = clock
        self._run_id = run_id
        self._corpus = corpus
        self._order = order
        self.newest: StorageLocation | None = None
        """Most recently saved checkpoint."""
        self._sound = {**dict.fromkeys(sound, True), **dict.fromkeys(failed, False)}
        """For each verified checkpoint, whether a run can resume from it."""
        self._written: set[StorageLocation] = set()
        """Checkpoints that this start has saved."""
        self._unproven: int | None = None
        """Step of the newest checkpoint until a finite step has followed it; then None."""
        self._lasted: float | None = None
        """Seconds that the last save took."""
        self._background = background
        self._began = 0.0
        """Start time of the asynchronous save, in monotonic seconds."""
        self._waited = 0.0
        """Seconds for which training has waited for the asynchronous save so far."""
        self._check: AsyncVerify | None = None
        """Verification in progress. The removal of old checkpoints continues after it."""
        self._removing: AsyncRemoval | None = None
        """Removal in progress, on rank 0."""

    def begin(self, run: Run) -> None:
        self.clock.restart()

    def before_step(self, run: Run, step: Step) -> None:
        step.save |= step.last or is_due(run.config.checkpoint.every, step.number)

    def requests(self, run: Run) -> RankRequests:
        ended = self._background is not None and self._background.ended
        if self._check is not None and self._step_being_saved is None:
            ended = self._check.ended
        return RankRequests(save=run.mesh.rank == 0 and self.clock.due, finish_save=ended)

    def after_step(self, run: Run, step: Step) -> None:
        if self._removing is not None and self._removing.ended:
            self._await_removal(run)
        if self._unproven is not None and any(
            result.step >= self._unproven
            and result.skipped is None
            and math.isfinite(result.loss)
            and math.isfinite(result.grad_norm)
            for result in step.results
        ):
            self._unproven = None
            if self._step_being_saved is None and not step.stop:
                self._remove_old(run)
        if any(result.requests.finish_save for result in step.results):
            if self._step_being_saved is not None:
                self.finish(run, leaves=step.stop)
            elif self._check is not None and not step.stop:
                self._take_check(run, self._check)
        if step.stop:
            step.unsaved = self._too_late(run) or ""
        if (step.save or step.stop) and not step.unsaved:
            run.check_settled()
            if step.last and not step.stop:
                self._keep_no_more(run)
            self._note_irregular(run, step.number)
            self.save(run, step.number, wait=step.last or step.stop)

    def _note_irregular(self, run: Run, step: int) -> None:
        """Print a line if a checkpoint outside `checkpoint.every` changes a no-flush run."""
        streaming, every = run.train_step.streaming, run.config.checkpoint.every
        regular = is_due(every, step) or step == run.config.train.steps
        if streaming is not None and streaming.forgets(step) and not regular:
            run.note(
                f"the checkpoint of step {step} is outside checkpoint.every={every}: "
                f"pipeline.weight_versions={run.config.pipeline.weight_versions} repeats the "
                "forwards in flight after it, so this run is not bitwise equal to one without "
                "this checkpoint"
            )

    def _too_late(self, run: Run) -> str | None:
        """Return why a save would not end within ``checkpoint.grace_s``, equally on all ranks; None
        if it would, or if the duration of a save is unknown."""
        grace = run.config.checkpoint.grace_s
        if grace is None:
            return None
        self.finish(run, leaves=True)
        since, late = run.stop.since, None
        if since is not None and self._lasted is not None:
            left = max(0.0, since + grace - time.monotonic())
            if self._lasted > left:
                late = (
                    f"the last save took {self._lasted:.3g} s, and {left:.3g} s are left of "
                    f"checkpoint.grace_s={grace:g}"
                )
        return run.mesh.agree(late)

    def after_rewind(self, run: Run, step: int) -> None:
        """Restart the clock. Old checkpoints are kept until a finite step follows the newest."""
        self.clock.restart()

    @property
    def _step_being_saved(self) -> int | None:
        return self._background.step if self._background is not None else None

    def save(self, run: Run, step: int, *, wait: bool) -> None:
        """Save the state after `step` steps; asynchronously if configured, unless `wait` is set.

        Raises :class:`CheckpointError` on all ranks, also if the previous save has failed, and
        :class:`LaunchError` if another job has the run folder.
        """
        run.phase("saving ...")
        run.callbacks.before_save(run, step)
        self.folder.check(run.mesh)
        self.finish(run, leaves=wait)
        began = time.monotonic()
        content = self.content(run, step)._asdict()
        if wait or self._background is None:
            path = save(self.checkpoints, group=run.mesh, **content)
            self._lasted = time.monotonic() - began
            self._note(run, path)
        else:
            self._background.begin(self.checkpoints, is_ours=self.folder.own, **content)
            self._began, self._waited = began, time.monotonic() - began
        self._unproven = step
        self.clock.restart()

    def content(self, run: Run, step: int) -> SaveArguments:
        """Return this rank's part of a checkpoint of the state after `step` steps."""
        return run.train_step.content(
            step,
            run_id=self._run_id,
            digests={
                "corpus": self._corpus.digest,
                "content": self._corpus.content,
                "tokenizer": self._corpus.tokenizer,
            },
            order=self._order,
        )

    def finish(self, run: Run, *, leaves: bool = False) -> None:
        """Wait for an asynchronous save and for a removal, if any; then remove old checkpoints,
        unless the run ends soon (`leaves`). Raises :class:`CheckpointError` on all ranks."""
        self._await_removal(run)
        if self._background is None or self._background.step is None:
            return
        began = time.monotonic()
        path = self._background.finish()
        now = time.monotonic()
        self._waited += now - began
        self._lasted = now - self._began
        self._note(
            run,
            path,
            f" in {now - self._began:.1f} s, of which training waited {self._waited:.3f} s",
        )
        if leaves:
            return
        if self._check is not None and run.mesh.share("ended" if self._check.ended else ""):
            self._take_check(run, self._check)
        elif self._unproven is None:
            self._remove_old(run)

    def _keep_no_more(self, run: Run) -> None:
        """Wait until all checkpoints that may be removed by now are removed."""
        self.finish(run)
        while self._check is not None:
            self._take_check(run, self._check)
        self._await_removal(run)

    def _note(self, run: Run, path: StorageLocation, more: str = "") -> None:
        self.newest = path
        self._written.add(path)
        run.note(f"saved {path}{more}")

    def _remove_old(self, run: Run) -> None:
        """Remove checkpoints older than those to keep, once a finite step follows the newest.

        Ranks verify a checkpoint before it counts as kept, and a checkpoint of an earlier start
        also before it is removed. With asynchronous saves training goes on meanwhile. Problems with
        reading and removing are printed.
        """
        assert self.newest is not None, "the checkpoint exists"
        if self._check is not None:
            return
        self._await_removal(run)
        mesh, waits = run.mesh, self._background is None
        self.folder.check(mesh)
        found = committed(self.checkpoints) if mesh.rank == 0 else []
        keys = [CheckpointName(*key) for key in json.loads(mesh.share(json.dumps(found)))]
        unknown: list[StorageLocation] = []

        def is_known(path: StorageLocation) -> bool:
            if path not in self._sound and waits:
                self._judge(run, path, *verified(path, mesh))
            if path not in self._sound:
                unknown.append(path)
            return path in self._sound

        paths = [self.checkpoints / key.name for key in keys]
        always = {
            path
            for path, key in zip(paths, keys, strict=True)
            if is_due(run.config.checkpoint.keep_every, key.step)
        }
        keep = run.config.checkpoint.keep
        try:
            unneeded = outdated(
                paths, keep, self.newest, lambda path: is_known(path) and self._sound[path]
            )
            old = [
                path
                for path in unneeded
                if path not in always and (path in self._written or is_known(path))
            ]
        except CheckpointError as error:
            self._not_removed(run, error)
            return
        if unknown:
            self._check = AsyncVerify(unknown[0], mesh, mesh.store)
        if old and mesh.rank == 0:
            self._removing = AsyncRemoval(lambda: _remove_all_but_weights(self.checkpoints, old))
            if waits:
                self._await_removal(run)

    def _take_check(self, run: Run, check: AsyncVerify) -> None:
        """Use the outcome of a verification, and continue with the removal."""
        self._check = None
        try:
            self._judge(run, check.path, *check.finish())
        except CheckpointError as error:
            self._not_removed(run, error)
            return
        if self._unproven is None:
            self._remove_old(run)

    @staticmethod
    def _not_removed(run: Run, error: CheckpointError) -> None:
        run.note(f"older checkpoints are not removed before the next save: {error}")

    def _judge(
        self, run: Run, path: StorageLocation, checkpoint: Checkpoint | None, problem: str
    ) -> None:
        """Record whether a run can resume from `path`. `checkpoint` is None if the checkpoint there
        is damaged; `problem` says how."""
        self._sound[path] = checkpoint is not None and checkpoint.has_state
        if checkpoint is None:
            run.note(f"a damaged checkpoint does not count as kept: {problem}")

    def distrust(self, path: StorageLocation) -> None:
        """Record that no run can resume from a checkpoint, so that it does not count as kept."""
        self._sound[path] = False

    def _await_removal(self, run: Run) -> None:
        removing, self._removing = self._removing, None
        if removing is not None:
            for problem in removing.finish():
                run.note(problem)

    def end(self, run: Run) -> None:
        self._await_removal(run)


def _remove_all_but_weights(root: StorageLocation, old: list[StorageLocation]) -> list[str]:
    """Remove checkpoints, except weights-only ones, even during a save; return the problems."""
    old = [path for path in old if not _has_weights_alone(path)]
    return remove(root, old, alone=False).problems


def _has_weights_alone(path: StorageLocation) -> bool:
    """Whether a checkpoint has only weights; False if it is damaged."""
    try:
        return not Checkpoint.open(path).has_state
    except CheckpointError:
        return False


class Clock:
    """A clock that is due when `seconds` have passed; never if `seconds` is 0."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Count the seconds from now on."""
        self._began = time.monotonic()

    @property
    def due(self) -> bool:
        return 0 < self._seconds <= time.monotonic() - self._began
