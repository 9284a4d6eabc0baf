"""The closing words on a run: ``python -m megapipe summary RUN_FOLDER``."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from megapipe.errors import ConfigError, MegapipeError
from megapipe.observe.console import duration


class Summary(BaseModel):
    """What the trainer leaves in ``summary.json`` of the run folder. Losses in nats per token."""

    model_config = ConfigDict(frozen=True)

    loss_first: float
    loss_last: float
    validation_loss: float
    unigram_entropy: float
    tokens_per_second: float
    run_folder: str
    steps: int
    seconds: float


def read_summary(run_folder: Path) -> Summary:
    """The summary of a finished run; ConfigError if the folder has none that can be read."""
    path = run_folder / "summary.json"
    try:
        return Summary.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a finished run has this file") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigError(f"{path}: {where}: {first['msg']}") from error


def format_summary(summary: Summary) -> str:
    """Four aligned lines of text."""
    ratio = summary.validation_loss / summary.unigram_entropy
    rows = {
        "trained": f"{summary.steps} steps in {duration(summary.seconds)}, "
        f"{summary.tokens_per_second:,.0f} tokens/s",
        "loss": f"from {summary.loss_first:.4f} to {summary.loss_last:.4f} nats per token",
        "validation": f"{summary.validation_loss:.4f}, {ratio:.2f} x the corpus' unigram entropy "
        f"of {summary.unigram_entropy:.4f}",
        "run folder": summary.run_folder,
    }
    return "\n".join(f"{name:<10}  {value}" for name, value in rows.items())


def main(argv: Sequence[str]) -> int:
    """Print the summary of the run folder that `argv` names; returns the exit code."""
    try:
        if len(argv) != 1 or argv[0].startswith("-"):
            raise ConfigError("usage: megapipe summary RUN_FOLDER")
        print(format_summary(read_summary(Path(argv[0]))))
    except MegapipeError as error:
        print(f"megapipe: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
