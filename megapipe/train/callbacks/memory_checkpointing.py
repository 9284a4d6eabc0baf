"""In-memory checkpoints, every given number of steps."""

from __future__ import annotations

import time

from megapipe.errors import CheckpointError
from megapipe.plan.memory import model_memory
from megapipe.plan.memory_fit import size_text
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.callbacks.checkpointing import Checkpointing
from megapipe.train.callbacks.validation import is_due
from megapipe.train.resume.memory_checkpoints import MemoryCheckpoints


class MemoryCheckpointing(Callback):
    """Saves to memory what the callback `saving` would save (``checkpoint.in_memory_every``),
    unless `saving` has just saved it. A failure is printed, and training goes on."""

    def __init__(self, copies: MemoryCheckpoints, saving: Checkpointing) -> None:
        self._copies = copies
        self._saving = saving
        self._reported = False

    def begin(self, run: Run) -> None:
        """Check that nodes have enough memory; raises :class:`CheckpointError` on all ranks."""
        grid, pipeline_ranks = run.mesh.grid, range(run.layout.pipeline_processes)
        saved = [
            model_memory(run.config, run.layout, rank).checkpoint_part for rank in pipeline_ranks
        ]
        each = [saved[grid.coordinates_of(rank).pp] for rank in range(grid.world)]
        need = self._copies.check_room(each)
        nodes = self._copies.nodes.count
        where = "of this node" if nodes == 1 else f"of each of {nodes} nodes, and in the next one's"
        run.note(
            f"in-memory checkpoint every {run.config.checkpoint.in_memory_every} steps, in "
            f"the memory {where}; two of them take at most {size_text(need)} on this node"
        )

    def before_step(self, run: Run, step: Step) -> None:
        step.settle |= is_due(run.config.checkpoint.in_memory_every, step.number)

    def after_step(self, run: Run, step: Step) -> None:
        is_saved = step.last or step.stop or (step.save and not run.config.checkpoint.async_save)
        if is_saved or not is_due(run.config.checkpoint.in_memory_every, step.number):
            return
        run.check_settled()
        run.callbacks.before_save(run, step.number)
        began = time.monotonic()
        try:
            self._copies.save(self._saving.content(run, step.number))
        except CheckpointError as problem:
            run.note(f"no in-memory checkpoint of step {step.number}: {problem}")
            return
        if not self._reported:
            self._reported = True
            seconds = time.monotonic() - began
            run.note(
                f"in-memory checkpoint of step {step.number} took {seconds:.3f} s (later "
                "ones are not reported)"
            )

    def after_rewind(self, run: Run, step: int) -> None:
        """Remove in-memory checkpoints of later steps: they used samples that are skipped now."""
        self._copies.forget(step)
