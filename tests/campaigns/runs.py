"""The runs of campaigns: their layouts, starting them with a fault, and comparing how they end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megapipe.checkpoint import Checkpoint
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import STAGING_PREFIX
from megapipe.errors import CheckpointError
from megapipe.observe.sample_log import check, read_samples
from tests.campaigns.rank import PLAN
from tests.parity.jobs import Job, Outcome, arguments, tiny
from tests.parity.launch_with import launched_with
from tests.parity.launches import run_forked
from tests.parity.stopped_runs import assert_same_files

FAULT = Path(__file__).with_name("planned.py")
LIMIT_S = 900.0
"""A job that takes longer hangs: eight processes may share two cores with others."""


class Layout(NamedTuple):
    """A number of processes, and the settings by which they share the work."""

    ranks: int
    settings: Mapping[str, str]


BEHIND = {"checkpoint.async_save": "true"}
LAYOUTS = {
    "dp2 tp2 pp2": Layout(8, {"parallel.dp": "2", "parallel.tp": "2", "parallel.pp": "2"}),
    "pp4 interleaved": Layout(4, {"parallel.pp": "4", "pipeline.chunks": "2", "model.layers": "8",
                                  "pipeline.schedule": "interleaved_1f1b"}),
    "dp2 pp2 zero 3, in the background": Layout(
        4, {"parallel.dp": "2", "parallel.pp": "2", "optimizer.zero": "3", **BEHIND}),
    "dp3 tp2 sequence parallel, in the background": Layout(
        6, {"parallel.dp": "3", "parallel.tp": "2", "parallel.sequence_parallel": "true",
            "train.global_batch": "12", **BEHIND}),
    "pp4 stash": Layout(
        4, {"parallel.pp": "4", "pipeline.weight_versions": "stash",
            "optimizer.clip_scope": "stage", "model.tied_embeddings": "false"}),
    "dp2 pp2 double_buffer, in the background": Layout(
        4, {"parallel.dp": "2", "parallel.pp": "2", "pipeline.weight_versions": "double_buffer",
            **BEHIND}),
}  # fmt: skip
STEPS, EVERY = 12, 2
SETTINGS = {
    "model.layers": "4",
    "model.dropout": "0.1",
    "train.global_batch": "8",
    "train.steps": str(STEPS),
    "checkpoint.every": str(EVERY),
    "checkpoint.keep": "2",
    "optimizer.max_grad_norm": "0.5",
    "parallel.timeout_s": "120",
    "log.sample_ids": "true",
}


def settings(shared: Path, folder: Path, given: Mapping[str, str]) -> list[str]:
    """Return the arguments of a run in `folder` on a corpus in `shared`, which is made."""
    shared.mkdir(parents=True, exist_ok=True)
    return arguments({**tiny(shared), **SETTINGS, "run.folder": str(folder / "runs"), **given})


def plan(folder: Path, fault: str = "", **given: Any) -> dict[str, str]:
    """Plan a fault, a class of ``module:name``, or none; returns the environment of its job."""
    (folder / "plan.json").write_text(json.dumps({"fault": fault, **given} if fault else {}))
    if fault:
        (folder / "armed").touch()
    return {PLAN: str(folder)}


def struck(folder: Path) -> dict[str, Any] | None:
    """Return what the fault that was planned in `folder` has noted; None if it has not struck."""
    path = folder / "struck.json"
    return json.loads(path.read_text()) if path.exists() else None


def launched(
    job: Job, ranks: int, environ: Mapping[str, str], *args: str, restarts: int = 3
) -> None:
    """Start ranks of a run by a launcher that starts them again."""
    launch = launched_with(FAULT, "--nproc", str(ranks), "--max-restarts", str(restarts))
    job.start([*launch, "train.py", *args], environ)


def forked(folder: Path, ranks: int, environ: Mapping[str, str], *args: str) -> Outcome:
    """Run ranks without a launcher to their end."""
    script = "tests/campaigns/rank.py"
    return run_forked(folder, ranks, *args, script=script, environ=environ, limit_s=LIMIT_S)


class Wholes:
    """Runs of layouts that nothing interrupts, each made when it is first asked for."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self._made: dict[str, Path] = {}

    def of(self, layout: Layout, **given: str) -> Path:
        """Return the folder of the run of a layout, with its settings replaced by those `given`."""
        name = json.dumps([layout, given], sort_keys=True)
        if name not in self._made:
            folder = self.shared / f"whole-{len(self._made)}"
            folder.mkdir(parents=True)
            args = settings(self.shared, folder, {**layout.settings, **given})
            outcome = forked(folder, layout.ranks, plan(folder), *args)
            assert set(outcome.codes) == {0}, outcome.text
            self._made[name] = folder
        return self._made[name]


def checkpoints(folder: Path) -> Path:
    """Return the checkpoint folder of the run in a trial's folder."""
    return folder / "runs/run/checkpoints"


def lines(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of the run's log; none if there is no log yet."""
    path = folder / "runs/run/log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of one kind in the run's log."""
    return [record for record in lines(folder) if record["kind"] == kind]


def steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the last line of each step, without what depends on a clock or on the memory in
    use."""
    kept = ("step", "loss", "lr", "grad_norm", "tokens", "samples")
    found = records(folder, "step")
    return {record["step"]: {name: record[name] for name in kept} for record in found}


def resumed(folder: Path, after: float = 0.0) -> tuple[int, float] | None:
    """Return the step from which the first start later than `after` resumed, and its time; None if
    none has."""
    for note in records(folder, "note"):
        if note["time"] > after and note["text"].startswith("resumed from"):
            return int(note["text"].partition(" at step ")[2].split()[0]), note["time"]
    return None


def assert_checkpoints(folder: Path) -> list[int]:
    """Check that each checkpoint that a reader would take is as it was written, with finite
    numbers, and that there is one. Return their steps. A job may be removing old ones meanwhile."""
    sound = []
    for key in committed(checkpoints(folder)):
        path = checkpoints(folder) / key.name
        try:
            Checkpoint.open(path).verify(finite=True)
            sound.append(key.step)
        except CheckpointError:
            if path.exists():
                raise
    assert sound, "there is no checkpoint to go on from"
    return sound


def assert_same_end(folder: Path, whole: Path) -> None:
    """Check that losses, norms, samples and remaining checkpoints are those of a whole run."""
    assert steps(folder) == steps(whole)
    own, others = (read_samples(place / "runs/run") for place in (folder, whole))
    check(own)
    assert own == others
    own, others = (
        {key.step: key.name for key in committed(checkpoints(f))} for f in (folder, whole)
    )
    assert max(own) == max(others)
    for step in own.keys() & others.keys():
        assert_same_files(checkpoints(folder) / own[step], checkpoints(whole) / others[step])
    left = [path.name for path in checkpoints(folder).glob(f"{STAGING_PREFIX}*")]
    assert not left, f"half-written: {left}"
