"""Times that a run measured of itself: operations by ``log.timeline``, and steps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megapipe.cli import configured
from megapipe.errors import ConfigError
from megapipe.layout.checks import check_device
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import known_speeds
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.unit import OPERATIONS, Operation
from megapipe.plan.units import Units

WARM_UP = 2
"""Number of steps at the beginning of a run that do not count."""
MEASURED = "measured"
"""Beginning of the name that a trace gives to the measured timeline."""

Measured = Mapping[tuple[int, Operation], float]


class MeasuredRun(NamedTuple):
    """Times that a run measured, and the costs from which a plan of it is made."""

    folder: Path
    units: Units
    operations: Measured
    """Median seconds of each kind of operation on a whole micro-batch, by stage."""
    step: float
    """Median seconds of a step."""

    @classmethod
    def read(cls, folder: Path, keys: Sequence[str]) -> MeasuredRun:
        """Read a run's folder. `keys`: values of the section `plan`, as words of a command line.

        Raises:
            ConfigError: not a run, a run without timelines, or a device that is not known.
        """
        file = folder / "config.yaml"
        if not file.is_file():
            raise ConfigError(f"{folder}: expected the folder of a run, with a config.yaml")
        config = configured([str(file), *keys])
        if config.plan.device is None:
            raise ConfigError(
                f"{folder}: the run does not say on which device it ran: expected --device NAME, "
                "as in H100 or cpu"
            )
        check_device(config.plan)
        config, layout = resolve(config, None, config.model.vocab_size, measure=BY_UNITS)
        known_speeds(config)
        if layout.schedule.sizes:
            raise ConfigError(
                f"{folder}: pipeline.schedule={config.pipeline.schedule} cuts micro-batches: "
                "expected a run with whole ones"
            )
        step = median(_steps(folder, config.train.tokens_per_step))
        return cls(folder, Units(config, layout), _operations(folder), step)


def _operations(folder: Path) -> Measured:
    """Return the median seconds of operations; those on slices of a micro-batch are added up."""
    files = sorted((folder / "timeline").glob("step_*.json"))
    found: defaultdict[tuple[int, Operation, int], list[float]] = defaultdict(list)
    for file in files:
        for stage, operation, part, seconds in _events(file):
            found[stage, operation, part].append(seconds)
    if not found:
        raise ConfigError(f"{folder}: expected a run with timelines: set log.timeline=[10,20,30]")
    whole: defaultdict[tuple[int, Operation], float] = defaultdict(float)
    for (stage, operation, _), times in found.items():
        whole[stage, operation] += median(times)
    return dict(sorted(whole.items()))


def _events(file: Path) -> Iterator[tuple[int, Operation, int, float]]:
    """Yield stage, kind, slice and seconds of each operation of a measured timeline."""
    names = {kind.name: operation for kind, operation in OPERATIONS.items()}
    try:
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        own = {
            event["pid"]
            for event in events
            if event["name"] == "process_name" and event["args"]["name"].startswith(MEASURED)
        }
        for event in events:
            if event["ph"] == "X" and event["pid"] in own and event["cat"] in names:
                at = event["args"]
                yield at["stage"], names[event["cat"]], at["slice"], event["dur"] / 1e6
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: expected a timeline of log.timeline: {error!r}") from None


def _steps(folder: Path, tokens: int) -> list[float]:
    """Return the seconds of the steps of `tokens` tokens after the first ones of each start."""
    file = folder / "log.jsonl"
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: expected the log of a run: {error}") from None
    found, before, count = list[float](), -1, 0
    for line in lines:
        if line.get("kind") != "step":
            continue
        count = count + 1 if line["step"] == before + 1 else 1
        before = line["step"]
        if count > WARM_UP and line["tokens"] == tokens:
            found.append(_number(line, "seconds", file))
    if not found:
        raise ConfigError(f"{file}: expected more than {WARM_UP} steps of {tokens:,} tokens")
    return found


def _number(line: Mapping[str, Any], name: str, file: Path) -> float:
    value = line.get(name)
    if not isinstance(value, float | int):
        raise ConfigError(f"{file}: expected a number as {name}, not {value!r}")
    return float(value)
