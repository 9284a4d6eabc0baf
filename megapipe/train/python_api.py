"""Training from Python: user code is passed as functions and classes, not by name."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megapipe import cli
from megapipe.config.config import Config
from megapipe.config.keys import refuse_code
from megapipe.errors import ConfigError, MegapipeError
from megapipe.launch import rendezvous
from megapipe.launch.launch_info import find_launch_info
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
    """Train as ``train.py`` does; return the run's folder, with summary, log and checkpoints.

    Without a launcher this process is the whole run (``pipeline.transport=in_process`` runs the
    pipeline in it), and Ctrl-C is a KeyboardInterrupt that saves nothing. Under a launcher every
    process calls this, and in the main thread signals have the same effect as in ``train.py``.

    Processes that are already in a process group, like those of Ray's TorchTrainer, train in it;
    the group continues to exist, and can be used for one run.

    Args:
        config: a :class:`~megapipe.config.config.Config`, a file or the name of one that comes with
            megapipe, or a mapping of sections, ``{"train": {"steps": 10}}``, or of keys,
            ``{"train.steps": 10}``.
        model: a function that returns the layers, as named by ``model.source``.
        data: a function that returns a data set, as named by ``data.source``.
        loss: a loss, as named by ``train.loss_function``.
        rule: a class of update rules, as named by ``optimizer.rule``.

            These four must be at the top level of a module, a script or a notebook: a checkpoint
            records them by name. ``run.user_code=refuse`` in `config` refuses code that `config`
            names; with one of these four, the run is recorded as one that allows user code.
        callbacks: hooks into the loop of the run, any objects
            (:class:`~megapipe.train.callbacks.callback.Callback`).

    Raises:
        MegapipeError: the error with which ``train.py`` would end.
    """
    from megapipe.distributed.mesh import world_size

    command = _command(config)
    given = {
        ("model", "source"): model,
        ("data", "source"): data,
        ("train", "loss_function"): loss,
        ("optimizer", "rule"): rule,
    }
    tree = command.config.model_dump()
    for (section, key), value in given.items():
        if value is not None:
            tree[section][key] = name_of(
                value, {"source": section, "loss_function": "loss"}.get(key, key)
            )
            tree["run"]["user_code"] = "allow"
    config = Config.model_validate(tree)
    info = find_launch_info(os.environ)
    if world_size() is not None:
        info = rendezvous.join_group(info)
    catches_signals = info.launched and threading.current_thread() is threading.main_thread()
    try:
        with StopRequest() if catches_signals else _NoSignals() as stop:
            stop.interrupt = partial(interrupt_early, info)
            command = replace(command, config=config, notice=None)
            job.start(command, info, stop, _Raising, callbacks)
    finally:
        if world_size() is not None:
            rendezvous.end_process_group(info)
    return Path(config.run.folder) / config.run.name


def name_of(value: Any, argument: str) -> str:
    """Return ``module:name`` of a function or class; raises :class:`ConfigError` if not
    importable."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None or getattr(sys.modules.get(module), name, None) is not value:
        kind = name or type(value).__name__
        raise ConfigError(
            f"{argument}={kind}: expected a function or class that is defined at the top level of "
            "a module, a script or a notebook"
        )
    return f"{module}:{name}"


def _command(given: Any) -> cli.Command:
    """Return the command to train with a configuration. Warn of old names of keys."""
    command = _parsed(given)
    if command.notice is not None:
        warnings.warn(command.notice, FutureWarning, stacklevel=3)
    return command


def _parsed(given: Any) -> cli.Command:
    if isinstance(given, Config):
        refuse_code(given, WHERE)
        return cli.Command(given, where=WHERE)
    if isinstance(given, Mapping):
        return cli.from_mapping(given, WHERE)
    if isinstance(given, (str, os.PathLike)):
        return cli.parse([os.fspath(given)])
    raise ConfigError(
        f"{WHERE}: config is a {type(given).__name__}: expected a Config, a mapping or a path"
    )


class _NoSignals(StopRequest):
    """Stop request that leaves signals to the caller's handlers."""

    def __init__(self) -> None:
        self.signal = None
        self.since = None
        self.phase = "setup"
        self.steady = threading.Lock()

    def __exit__(self, *_: object) -> None:
        pass


class _Raising(Shutdown):
    """Shutdown that raises errors in this process, after it has told the other processes."""

    def report(self, error: MegapipeError, *, printed: bool = False) -> NoReturn:
        super().report(error, printed=printed or self.info.world == 1)
        raise error

    def report_unexpected(self, error: BaseException) -> NoReturn:
        if self.info.world > 1:
            super().report_unexpected(error)
        raise error
