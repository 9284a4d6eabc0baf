"""Reads the number of choices of each expert from the log of a run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megapipe.errors import ConfigError

LOG = "log.jsonl"

Choices = Mapping[int, Mapping[int, Sequence[int]]]
"""Number of choices of each expert, by step and then layer."""


def recorded(path: Path) -> Choices:
    """Read the choices in a log. If a step was logged twice, the later record is used. Raises
    :class:`ConfigError`."""
    found: dict[int, Mapping[int, Sequence[int]]] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if b'"counts"' in line:
                    found.update(_of_line(line, f"{path}: line {number}"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected the folder of a run") from None
    if not found:
        raise ConfigError(
            f"{path} has no choices of experts: expected a run with model.moe.num_experts and "
            "log.expert_counts_every"
        )
    return found


def _of_line(line: bytes, where: str) -> Choices:
    """Return the choices in a line of the log, by step; {} if the step has none."""
    try:
        record = json.loads(line)
        counts = record["routing"]["counts"]
        if counts is None:
            return {}
        choices = {int(layer): [int(each) for each in own] for layer, own in counts.items()}
        step = int(record["step"])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{where}: expected a step as a run logs it") from None
    if not choices or any(min(own, default=0) < 0 or sum(own) == 0 for own in choices.values()):
        raise ConfigError(f"{where}: expected choices of the experts of each layer")
    return {step: choices}
