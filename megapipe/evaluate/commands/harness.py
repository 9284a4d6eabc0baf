"""Tasks of EleutherAI's lm-evaluation-harness (pip install lm_eval): its own, or local YAML files.
The harness downloads data sets that a task names on the hub.

example: evaluate.py harness runs/large --tasks lambada_openai,hellaswag --limit 100
         evaluate.py harness runs/large --tasks my_task --include-path my_tasks
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
from pathlib import Path
from typing import Any

from megapipe.command_line import Parser
from megapipe.errors import ConfigError, DataError, MegapipeError
from megapipe.evaluate.commands.arguments import add_common, batch_of, show
from megapipe.inference.arguments import add_model, model_of
from megapipe.text import one_line

PURPOSE = "run tasks of lm-evaluation-harness (needs lm_eval)"


def add(parser: Parser) -> None:
    add_model(parser)
    what = parser.add_argument_group("tasks")
    what.add_argument(
        "--tasks", required=True, metavar="NAMES", help="names of tasks, separated by commas"
    )
    what.add_argument(
        "--include-path", type=Path, metavar="FOLDER", help="folder with user tasks in YAML"
    )
    what.add_argument(
        "--num-fewshot",
        type=int,
        metavar="N",
        help="examples before each question (default: the task's)",
    )
    what.add_argument(
        "--limit", type=int, metavar="N", help="evaluate only the first N samples of each task"
    )
    add_common(parser)


def run(given: argparse.Namespace) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("lm-evaluation-harness is not installed; pip install lm_eval")
    batch = batch_of(given)
    for option in ("num_fewshot", "limit"):
        value, least = getattr(given, option), int(option == "limit")
        if value is not None and value < least:
            name = option.replace("_", "-")
            raise ConfigError(f"--{name} {value}: expected at least {least}")
    if given.include_path is not None and not given.include_path.is_dir():
        raise ConfigError(f"--include-path {given.include_path}: no such folder")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = model_of(given)

    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from megapipe.evaluate.harness import HarnessModel

    folder = given.include_path
    manager = TaskManager(include_path=None if folder is None else str(folder))
    names = [name for name in given.tasks.split(",") if name]
    for name in names:
        if not manager.match_tasks([name]):
            raise ConfigError(f"--tasks {name}: lm_eval {_version()} has no such task")
    if not names:
        raise ConfigError("--tasks: expected the name of a task")
    try:
        found: Any = simple_evaluate(
            model=HarnessModel(model, batch=batch),
            tasks=names,
            task_manager=manager,
            num_fewshot=given.num_fewshot,
            limit=given.limit,
            log_samples=False,
        )
    except (MegapipeError, RuntimeError, KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:  # a task's data and code may raise anything
        raise DataError(f"--tasks {given.tasks}: {one_line(error)}") from error
    results = {} if found is None else found["results"]
    show(given, "\n".join(lines_of(results)), results)


def lines_of(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each task, with its metrics and, where available, their standard errors."""
    lines = []
    for task, metrics in results.items():
        parts = []
        for key, value in metrics.items():
            name, _, kind = key.partition(",")
            if not kind or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{name}_stderr,{kind}")
            extra = f" +- {error:.4f}" if isinstance(error, float) else ""
            parts.append(f"{name} {value:.4f}{extra}{'' if kind == 'none' else f' ({kind})'}")
        lines.append(f"{task}: {' | '.join(parts)}")
    return lines


def _version() -> str:
    from importlib.metadata import version

    return version("lm_eval")
