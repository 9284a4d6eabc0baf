"""The layout of a run whose configuration leaves it to a search: ``parallel.tp=auto``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from megapipe.cli import Command, configured
from megapipe.command_line import phase
from megapipe.config.config import Config
from megapipe.errors import ConfigError, MegapipeError
from megapipe.observe.provenance import newest_config
from megapipe.plan.search.layouts import DEFAULTS, value_of, with_keys, words_of
from megapipe.plan.search.search import Search, nothing_fits
from megapipe.util import heartbeat

SIZES = ("parallel.dp", "parallel.tp", "parallel.pp", "parallel.cp")
"""Keys whose product is the number of processes."""


def search_layout(command: Command, gpus: int) -> dict[str, Any]:
    """Choose the values of the keys that `command` leaves to a search, and print them.

    A run that resumes keeps the values of its newest start, if that had as many processes.

    Returns:
        The values by key.

    Raises:
        ConfigError: no layout of `gpus` processes fits, or the device's speed is unknown.
    """
    free = free_keys(command)
    earlier = None if command.config.run.resume == "never" else _of_run(command.config, free, gpus)
    if earlier is not None:
        return earlier
    try:
        search = Search(command.config, free, gpus)
        with phase(f"searching the fastest layout of {gpus} processes", in_logs=True):
            found = search.run(1)
    except MegapipeError as error:
        raise type(error)(f"{command.where}: {error}") from None
    if not found.complete:
        raise KeyboardInterrupt
    if not found.best:
        raise ConfigError(f"{command.where}: {nothing_fits(search, found)}")
    best = found.best[0]
    chosen = {key: value for key, value in best.choice.keys.items() if key in free}
    heartbeat.print_notice(f"layout: {' '.join(words_of(chosen))}; {best.seconds:.4g} s a step")
    return chosen


def free_keys(command: Command) -> frozenset[str]:
    """Return the keys that a search chooses: those that are auto, and those that go with them.

    Raises:
        ConfigError: all pipeline ranks run in one process.
    """
    config, free = command.config, set(command.searched)
    if config.pipeline.transport == "in_process":
        raise ConfigError(
            f"{command.where}: a search plans a process for each pipeline rank: with "
            f"pipeline.transport=in_process expected values of {', '.join(sorted(free))}"
        )
    if "pipeline.schedule" in free:
        free.add("pipeline.chunks")
    if "parallel.tp" in free and not config.parallel.sequence_parallel:
        free.add("parallel.sequence_parallel")
    return frozenset(free)


def with_values(command: Command, values: Mapping[str, Any]) -> Command:
    """Return `command` with the chosen values of the keys that it left to a search."""
    config = with_keys(command.config, values)
    return replace(command, config=config, searched=frozenset())


def _of_run(config: Config, free: Collection[str], gpus: int) -> dict[str, Any] | None:
    """Return the values of the run's newest start; None without one of `gpus` processes and with
    the same fixed sizes."""
    path = newest_config(Path(config.run.folder) / config.run.name)
    if path is None:
        return None
    try:
        earlier = configured([str(path)])
    except ConfigError:  # of another version
        return None
    world = prod(value_of(earlier, key) or 1 for key in SIZES)
    fixed = [key for key in SIZES if key not in free and value_of(config, key) is not None]
    changed = any(value_of(config, key) != value_of(earlier, key) for key in fixed)
    if world != gpus or changed:
        return None
    return {key: value_of(earlier, key) for key in DEFAULTS if key in free}
