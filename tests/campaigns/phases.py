"""The phases of a save, as calls of functions before or after which a rank may be killed."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megapipe.train.callbacks import Run
from tests.campaigns.rank import Fault

WRITER, SHARD = "megapipe.checkpoint.writer", "megapipe.checkpoint.shard"
LOCAL = "megapipe.checkpoint.local"
BACKGROUND, SAVING = "megapipe.checkpoint.async_save", "megapipe.train.callbacks.checkpointing"


class Phase(NamedTuple):
    """Functions, ``module:name``, of which a save calls one."""

    functions: tuple[str, ...]
    lead: bool = False
    """Whether rank 0 alone calls it."""
    background: bool = False
    """Whether background saves alone call it."""
    calls: int = 1
    """Calls that each rank makes in a save."""
    calls_of_first: int = 1
    """Calls that rank 0 makes in a save."""


PHASES = {
    "making the staging folder": Phase((f"{WRITER}:_make_staging",), lead=True),
    "copying the state": Phase((f"{BACKGROUND}:Snapshot.take",), background=True),
    "writing a shard": Phase((f"{WRITER}:write_shard",)),
    "writing a tensor": Phase((f"{SHARD}:checksum",), calls=4, calls_of_first=4),
    "any fsync": Phase(("os:fsync",), calls=3, calls_of_first=8),
    "listing what was written": Phase((f"{WRITER}:seal",)),
    "syncing a folder": Phase((f"{LOCAL}:sync_folder",), calls=1, calls_of_first=4),
    "counting the own part": Phase((f"{BACKGROUND}:write",), background=True),
    "committing": Phase((f"{WRITER}:commit", f"{BACKGROUND}:commit"), lead=True),
    "merging the lists": Phase((f"{WRITER}:build_manifest",), lead=True),
    "naming the checkpoint": Phase((f"{WRITER}:next_name",), lead=True),
    "renaming": Phase(("os:rename",), lead=True),
    "pointing at it": Phase((f"{WRITER}:point_at",), lead=True),
    "taking the outcome": Phase((f"{BACKGROUND}:AsyncSaver.finish",), background=True),
    "choosing what is old": Phase((f"{SAVING}:outdated",)),
    "removing what is old": Phase((f"{SAVING}:remove",), lead=True),
    "deleting files": Phase(("shutil:rmtree",), lead=True),
}


class InPhase(Fault):
    """Kills this process by -9 before or after the `call`-th call of a phase from the step on."""

    def __init__(
        self, folder: Path, rank: int, step: int, phase: str, when: str, call: int
    ) -> None:
        super().__init__(folder, rank, step)
        self._phase, self._when = PHASES[phase], when
        self._left = itertools.count(call, -1)

    def arm(self, run: Run) -> None:
        for place in self._phase.functions:
            module, _, names = place.partition(":")
            *owners, name = names.split(".")
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            setattr(owner, name, self._deadly(getattr(owner, name)))

    def _deadly(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            fatal = next(self._left) == 1
            if fatal and self._when == "before":
                self._die()
            result = function(*args, **given)
            if fatal:
                self._die()
            return result

        return call

    def _die(self) -> None:
        self.struck()
        os.kill(os.getpid(), signal.SIGKILL)
