"""Checkpoints: every so many steps, by the clock, where somebody asks, and at the end."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable

from megapipe.checkpoint.background import AsyncSaver
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
from megapipe.train.totals import Wishes


class Checkpointing(Callback):
    """Saves into the run folder, and deletes older checkpoints there (``checkpoint.keep``), but for
    those of weights alone, which no run saves.

    `clock` says when a checkpoint is due by time: that of rank 0 decides. `sound` are checkpoints
    of earlier starts that have been verified; those that have `failed` do not count as kept. With
    `background` training goes on during all saves but the last, and while checkpoints are looked at
    and removed.
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
        """The checkpoint that was saved last."""
        self._sound = {**dict.fromkeys(sound, True), **dict.fromkeys(failed, False)}
        """Whether checkpoints can be gone on from, of those that were looked at."""
        self._written: set[StorageLocation] = set()
        """Checkpoints that this start has saved."""
        self._unproven: int | None = None
        """The step of the checkpoint that was saved last, if no finite step has followed it."""
        self._lasted: float | None = None
        """Seconds that the last save took."""
        self._background = background
        self._began = 0.0
        """When the save in the background began, monotonic seconds..."""
        self._waited = 0.0
        """... and for how many of them training has waited so far."""
        self._check: AsyncVerify | None = None
        """The look at a checkpoint that has to be over before more can be said of what to keep."""
        self._removing: AsyncRemoval | None = None
        """On rank 0: the removal under way."""

    def begin(self, run: Run) -> None:
        self.clock.restart()

    def before_step(self, run: Run, step: Step) -> None:
        step.save |= step.last or is_due(run.config.checkpoint.every, step.number)

    def wishes(self, run: Run) -> Wishes:
        ended = self._background is not None and self._background.ended
        if self._check is not None and self._step_under_way is None:
            ended = self._check.ended
        return Wishes(save=run.mesh.rank == 0 and self.clock.due, finish=ended)

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
            if self._step_under_way is None and not step.stop:
                self._remove_old(run)
        if any(result.wishes.finish for result in step.results):
            if self._step_under_way is not None:
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
        """Tell where a checkpoint that is not due by number changes a run without a flush."""
        streaming, every = run.train_step.streaming, run.config.checkpoint.every
        regular = is_due(every, step) or step == run.config.train.steps
        if streaming is not None and streaming.forgets(step) and not regular:
            run.note(
                f"the checkpoint of step {step} is one beside those of checkpoint.every={every}: "
                f"pipeline.weights={run.config.pipeline.weights} runs the forwards in flight again "
                "behind it, so this run is not to the bit one that does not save here"
            )

    def _too_late(self, run: Run) -> str | None:
        """Why a save would not be over in ``checkpoint.grace_s``, on all ranks alike; None: it
        would, or nobody knows."""
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
        """The checkpoint is still to be followed by a step with finite numbers."""
        self.clock.restart()

    @property
    def _step_under_way(self) -> int | None:
        return self._background.step if self._background is not None else None

    def save(self, run: Run, step: int, *, wait: bool) -> None:
        """Save the state after `step` steps, or begin to, unless training is to `wait`.

        Raises :class:`CheckpointError` on all ranks, also for the save before, and
        :class:`LaunchError` where another job has the run folder.
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
        """This rank's part of a checkpoint of the state after `step` steps."""
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
        """Wait for the save in the background, if there is one, and remove old checkpoints, unless
        the run `leaves` soon; wait for a removal. Raises :class:`CheckpointError` on all ranks."""
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
        """Wait until all that is not to be kept is removed, as far as steps have proven it."""
        self.finish(run)
        while self._check is not None:
            self._take_check(run, self._check)
        self._await_removal(run)

    def _note(self, run: Run, path: StorageLocation, more: str = "") -> None:
        self.newest = path
        self._written.add(path)
        run.note(f"saved {path}{more}")

    def _remove_old(self, run: Run) -> None:
        """Remove what is older than the checkpoints to keep, now that a step with finite numbers
        has followed the newest.

        No checkpoint counts as kept, and none of an earlier start is removed, before ranks have
        looked at it: at once, or while training goes on where saves are in the background. What
        cannot be read or removed is told.
        """
        assert self.newest is not None, "there is a checkpoint that was to be followed"
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
        """Take the outcome of a look at a checkpoint, and go on with removing."""
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
        """Note whether a checkpoint, None if it has a `problem`, is one to go on from."""
        self._sound[path] = checkpoint is not None and checkpoint.has_state
        if checkpoint is None:
            run.note(f"a damaged checkpoint, which does not count as kept: {problem}")

    def distrust(self, path: StorageLocation) -> None:
        """A checkpoint does not count as kept any more."""
        self._sound[path] = False

    def _await_removal(self, run: Run) -> None:
        removing, self._removing = self._removing, None
        if removing is not None:
            for problem in removing.finish():
                run.note(problem)

    def end(self, run: Run) -> None:
        self._await_removal(run)


def _remove_all_but_weights(root: StorageLocation, old: list[StorageLocation]) -> list[str]:
    """Remove checkpoints but for those of weights alone, also while another is being saved; returns
    the problems."""
    old = [path for path in old if not _has_weights_alone(path)]
    return remove(root, old, alone=False).problems


def _has_weights_alone(path: StorageLocation) -> bool:
    """Whether nothing but weights was put there; not where it is damaged."""
    try:
        return not Checkpoint.open(path).has_state
    except CheckpointError:
        return False


class Clock:
    """Says when `seconds` have passed; 0: never."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Count the seconds from now on."""
        self._began = time.monotonic()

    @property
    def due(self) -> bool:
        return 0 < self._seconds <= time.monotonic() - self._began
