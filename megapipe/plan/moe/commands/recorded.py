"""The choices of each expert that a run has logged."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megapipe.errors import ConfigError

LOG = "log.jsonl"

Choices = Mapping[int, Mapping[int, Sequence[int]]]
"""By step and layer those of each expert."""


def recorded(path: Path) -> Choices:
    """The choices in a log; of a step that was repeated the later ones. Raises
    :class:`ConfigError`."""
    found: dict[int, Mapping[int, Sequence[int]]] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if b'"counts"' in line:
                    found.update(_of_line(line, f"{path}: line {number}"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a run has this file in its folder") from None
    if not found:
        raise ConfigError(
            f"{path}: no step has the choices of experts: expected those of a run with "
            "model.moe.experts and log.experts_every"
        )
    return found


def _of_line(line: bytes, where: str) -> Choices:
    """Those of a step, if it has any."""
    try:
        told = json.loads(line)
        counts = told["routing"]["counts"]
        if counts is None:
            return {}
        choices = {int(layer): [int(each) for each in own] for layer, own in counts.items()}
        step = int(told["step"])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{where}: expected a step as a run logs it") from None
    if not choices or any(min(own, default=0) < 0 or sum(own) == 0 for own in choices.values()):
        raise ConfigError(f"{where}: expected choices of the experts of each layer")
    return {step: choices}
