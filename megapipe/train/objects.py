"""A run from Python: a configuration, and objects in place of the names that it would give."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megapipe import cli
from megapipe.config.config import Config
from megapipe.config.keys import refuse_code
from megapipe.errors import ConfigError, MegapipeError
from megapipe.launch import rendezvous
from megapipe.launch.place import find_launch_info
from megapipe.launch.shutdown import Shutdown, interrupt_early
from megapipe.launch.signals import StopRequest
from megapipe.train import job

if TYPE_CHECKING:
    from megapipe.train.callbacks.callback import Callback

WHERE = "megapipe.train"


def train(
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    *,
    model: Callable[..., Any] | None = None,
    data: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    rule: type | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Train as ``train.py`` does; returns the run's folder, with its summary, log and checkpoints.

    In a plain process that is all of the run (``pipeline.channels=in_process`` has the pipeline in
    it), and Ctrl-C is a KeyboardInterrupt that saves nothing; under a launcher every process calls
    it, and signals mean what they mean to ``train.py``, if that is in the main thread.

    Processes that are in a process group already, as those of Ray's TorchTrainer are, train in it;
    it is there afterwards, and takes one run.

    Args:
        config: a :class:`~megapipe.config.config.Config`, a file or the name of one that comes with
            megapipe, or a mapping of sections, ``{"train": {"steps": 10}}``, or of keys,
            ``{"train.steps": 10}``.
        model: a function that returns the layers, as ``model.source`` names one.
        data: a function that returns a data set, as ``data.source`` does.
        loss: a loss, as ``train.loss`` does.
        rule: a class of update rules, as ``optimizer.rule`` does.

            These four are at the top level of a module, a script or a notebook: a checkpoint says
            what it was trained with. ``run.own_code=refuse`` in `config` refuses code that `config`
            names; with one of these, the run is recorded as one that allows its own.
        callbacks: hooks into the loop of the run, any objects
            (:class:`~megapipe.train.callbacks.callback.Callback`).

    Raises:
        MegapipeError: whatever ``train.py`` ends with.
    """
    from megapipe.distributed.mesh import world_size

    config, where = _config(config)
    given = {
        ("model", "source"): model,
        ("data", "source"): data,
        ("train", "loss"): loss,
        ("optimizer", "rule"): rule,
    }
    tree = config.model_dump()
    for (section, key), value in given.items():
        if value is not None:
            tree[section][key] = name_of(value, {"source": section}.get(key, key))
            tree["run"]["own_code"] = "allow"
    config = Config.model_validate(tree)
    info = find_launch_info(os.environ)
    if world_size() is not None:
        info = rendezvous.join_group(info)
    hears = info.launched and threading.current_thread() is threading.main_thread()
    try:
        with StopRequest() if hears else _NoSignals() as stop:
            stop.interrupt = partial(interrupt_early, info)
            job.start(cli.Command(config, where=where), info, stop, _Raising, callbacks)
    finally:
        if world_size() is not None:
            rendezvous.end_process_group(info)
    return Path(config.run.folder) / config.run.name


def name_of(value: Any, argument: str) -> str:
    """``module:name`` of a function or class; raises :class:`ConfigError` where it has none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None or getattr(sys.modules.get(module), name, None) is not value:
        kind = name or type(value).__name__
        raise ConfigError(
            f"{argument}={kind}: expected a function or class that is defined at the top level of "
            "a module, a script or a notebook"
        )
    return f"{module}:{name}"


def _config(given: Any) -> tuple[Config, str]:
    """A configuration, and where it is from."""
    if isinstance(given, Config):
        refuse_code(given, WHERE)
        return given, WHERE
    if isinstance(given, Mapping):
        return cli.from_mapping(given, WHERE), WHERE
    if isinstance(given, (str, os.PathLike)):
        command = cli.parse([os.fspath(given)])
        return command.config, command.where
    raise ConfigError(
        f"{WHERE}: config is a {type(given).__name__}: expected a Config, a mapping or a path"
    )


class _NoSignals(StopRequest):
    """Signals keep the meaning that they have for the caller."""

    def __init__(self) -> None:
        self.signal = None
        self.since = None
        self.phase = "setup"
        self.steady = threading.Lock()

    def __exit__(self, *_: object) -> None:
        pass


class _Raising(Shutdown):
    """An error is raised, once other processes know of it."""

    def report(self, error: MegapipeError, *, said: bool = False) -> NoReturn:
        super().report(error, said=said or self.info.world == 1)
        raise error

    def report_unexpected(self, error: BaseException) -> NoReturn:
        if self.info.world > 1:
            super().report_unexpected(error)
        raise error
