"""Copies of the state in the memory of the nodes, every so many steps."""

from __future__ import annotations

import time

from megapipe.errors import CheckpointError
from megapipe.plan.demand import size_text
from megapipe.plan.memory import model_memory
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.callbacks.saving import Checkpointing
from megapipe.train.callbacks.validation import is_due
from megapipe.train.resume.memory_copies import MemoryCheckpoints


class MemoryCheckpointing(Callback):
    """Copies what `saving`, which comes before it, would save (``checkpoint.memory_every``), but
    where that has just been saved. A copy that fails is told, and training goes on."""

    def __init__(self, copies: MemoryCheckpoints, saving: Checkpointing) -> None:
        self._copies = copies
        self._saving = saving
        self._told = False

    def begin(self, run: Run) -> None:
        """Raises :class:`CheckpointError` on all ranks where a node has no room."""
        grid, pipeline_ranks = run.mesh.grid, range(run.layout.pipeline_processes)
        saved = [
            model_memory(run.config, run.layout, rank).checkpoint_part for rank in pipeline_ranks
        ]
        each = [saved[grid.coordinates_of(rank).pp] for rank in range(grid.world)]
        need = self._copies.check_room(each)
        nodes = self._copies.nodes.count
        where = "of this node" if nodes == 1 else f"of each of {nodes} nodes, and in the next one's"
        run.note(
            f"copies of the state go every {run.config.checkpoint.memory_every} steps to the "
            f"memory {where}; two take at most {size_text(need)} here"
        )

    def before_step(self, run: Run, step: Step) -> None:
        step.settle |= is_due(run.config.checkpoint.memory_every, step.number)

    def after_step(self, run: Run, step: Step) -> None:
        is_saved = step.last or step.stop or (step.save and not run.config.checkpoint.background)
        if is_saved or not is_due(run.config.checkpoint.memory_every, step.number):
            return
        run.check_settled()
        run.callbacks.before_save(run, step.number)
        began = time.monotonic()
        try:
            self._copies.save(self._saving.content(run, step.number))
        except CheckpointError as problem:
            run.note(f"there is no copy of step {step.number} in memory: {problem}")
            return
        if not self._told:
            self._told = True
            seconds = time.monotonic() - began
            run.note(f"copied step {step.number} to memory in {seconds:.3f} s, as later ones")

    def after_rewind(self, run: Run, step: int) -> None:
        """Forget copies of later steps: they have samples that are now left out."""
        self._copies.forget(step)
