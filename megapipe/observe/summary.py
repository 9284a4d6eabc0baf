"""The summary of a finished run: ``python -m megapipe summary RUN_FOLDER``."""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from megapipe import cli
from megapipe.checkpoint.find import OF_A_RUN
from megapipe.checkpoint.folders import committed
from megapipe.command_line import Parser, run_command
from megapipe.config.config import TrainConfig
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve
from megapipe.model.gpt.hf.config import has_class
from megapipe.observe.console import duration
from megapipe.observe.provenance import newest_config


class Summary(BaseModel):
    """The content of ``summary.json`` in the run folder. Losses are in nats per token."""

    model_config = ConfigDict(frozen=True)

    loss_first: float
    loss_last: float
    validation_loss: float | None
    """Final loss on the validation set; None if there is no validation set, or several."""
    held_out: dict[str, float | None] = {}
    """Final loss on each named validation set and each test set."""
    unigram_entropy: float | None
    """Unigram entropy of the corpus; None if unknown."""
    tokens_per_second: float
    run_folder: str
    steps: int
    seconds: float


def read_summary(run_folder: Path) -> Summary:
    """Read the summary of a finished run. Raises ConfigError if the folder has none, or if it
    cannot be read."""
    path = run_folder / "summary.json"
    try:
        return Summary.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; expected the folder of a finished run"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigError(f"{path}: {where}: {first['msg']}") from error


def format_summary(summary: Summary, commands: dict[str, str] | None = None) -> str:
    """Format the summary as aligned lines. The last lines are shell `commands`, by purpose."""
    rows = {
        "trained": f"{summary.steps} steps in {duration(summary.seconds)}, "
        f"{summary.tokens_per_second:,.0f} tokens/s",
        "loss": f"from {summary.loss_first:.4f} to {summary.loss_last:.4f} nats per token",
        **_losses(summary),
        "run folder": summary.run_folder,
        **(commands or {}),
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _losses(summary: Summary) -> dict[str, str]:
    """Return the text about the final loss on each held-out set, by caption."""
    rows = {
        name: "not finite" if loss is None else f"{loss:.4f}"
        for name, loss in summary.held_out.items()
    }
    if summary.validation_loss is None:
        return rows or {"validation": "no validation data"}
    entropy = summary.unigram_entropy
    if entropy is None:
        compared = "the corpus' unigram entropy is not known"
    else:
        ratio = summary.validation_loss / entropy
        compared = f"{ratio:.2f} x the corpus' unigram entropy of {entropy:.4f}"
    return {"validation": f"{summary.validation_loss:.4f}, {compared}", **rows}


def next_commands(
    run_folder: Path, reached: int | None = None, options: Sequence[str] | None = None
) -> dict[str, str]:
    """Return shell commands that use or continue the run, by purpose; {} if the run has recorded no
    configuration.

    Args:
        run_folder: the run's folder.
        reached: number of steps that the run has done; default: the step of its newest checkpoint.
        options: options of the launcher; default: ``--nproc`` with the run's number of processes.
    """
    path = newest_config(run_folder)
    if path is None:
        return {}
    config = cli.parse([str(path)]).config
    resolved, layout = resolve(config, None, config.model.vocab_size)
    python = os.path.relpath(sys.executable)
    if python.startswith(os.pardir):
        python = sys.executable
    megapipe = [python, "-m", "megapipe"]
    options = ("--nproc", str(layout.world)) if options is None else options
    launch = [*megapipe, "launch", *options]
    found = {
        "to generate": shlex.join([*megapipe, "generate", str(run_folder), "--prompt", "def "]),
        "to continue": shlex.join([*launch, *resume_arguments(path, reached)]),
    }
    if has_class(resolved.model):
        export = ("convert", "megapipe-to-hf", str(run_folder), f"{run_folder.name}-hf")
        found["to export"] = shlex.join([*megapipe, *export])
    return found


def resume_arguments(path: Path, reached: int | None = None) -> list[str]:
    """Return the arguments after ``python`` that continue a run.

    Args:
        path: the configuration file of the run's newest start, in the run folder.
        reached: number of steps that the run has done; default: the step of its newest checkpoint,
            or without a checkpoint the number of steps that the configuration asks for.
    """
    train = cli.parse([str(path)]).config.train
    if reached is None:
        saved = committed(path.parent / OF_A_RUN)
        reached = saved[0].step if saved else train.last_step
    return ["-m", "megapipe", "train", str(path), *_further(train, reached)]


def _further(train: TrainConfig, reached: int) -> Iterator[str]:
    """Yield the settings that a run at step `reached` needs in order to make further steps: twice
    `train.steps` if all steps are done, and no `train.stop_after` if that step is reached."""
    if reached >= train.steps:
        yield f"train.steps={2 * train.steps}"
    if train.stop_after is not None and reached >= train.stop_after:
        yield "train.stop_after=null"


def parser() -> Parser:
    """Return the parser of the command."""
    top = Parser(description="Summarize a finished run.")
    top.add_argument("folder", type=Path, help="folder of the run")
    top.set_defaults(run=_show)
    return top


def main(argv: Sequence[str]) -> int:
    """Print the summary of the run folder that `argv` names; returns the exit code."""
    return run_command(parser(), argv)


def _show(given: argparse.Namespace) -> None:
    print(format_summary(read_summary(given.folder), next_commands(given.folder)))
