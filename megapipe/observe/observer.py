"""The observer, which passes every record to every sink that is switched on."""

import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megapipe.config.config import Config, LogConfig
from megapipe.errors import ConfigError
from megapipe.observe.console import ConsoleSink
from megapipe.observe.jsonl import JsonlSink
from megapipe.observe.record import Sink, StepRecord, ValidationRecord
from megapipe.text import without_secrets

_log = logging.getLogger(__name__)


class Observer:
    """Reports on a run to all sinks; lives on one rank.

    A failure of a sink (a full disk, a closed pipe, a lost service) never reaches the training. The
    first failure of each sink causes a warning; the sink still gets all later records.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._failed: set[str] = set()

    def step(self, record: StepRecord) -> None:
        """Report one optimizer step."""
        self._each(lambda sink: sink.step(record))

    def validation(self, record: ValidationRecord) -> None:
        """Report one validation."""
        self._each(lambda sink: sink.validation(record))

    def note(self, text: str) -> None:
        """Report a line of text."""
        text = without_secrets(text)
        self._each(lambda sink: sink.note(text))

    def phase(self, text: str) -> None:
        """Show on a terminal which phase of the run begins."""
        self._each(lambda sink: sink.phase(text) if isinstance(sink, ConsoleSink) else None)

    def close(self) -> None:
        """Flush and close every sink."""
        self._each(lambda sink: sink.close())

    def _each(self, action: Callable[[Sink], object]) -> None:
        for sink in self._sinks:
            try:
                action(sink)
            except Exception as error:
                if sink.name not in self._failed:
                    self._failed.add(sink.name)
                    _warn(sink.name, error)


def build_sinks(config: Config, run_folder: Path, flat_config: Mapping[str, object]) -> Observer:
    """Make the observer of a run: console and ``log.jsonl`` always, the others as configured.

    ``run_folder`` must exist; ``flat_config`` is the resolved configuration by dotted key. A sink
    that cannot be opened is omitted with a warning. Call this function on one rank only.
    """

    def jsonl() -> Sink:
        return JsonlSink(run_folder / "log.jsonl")

    def tensorboard() -> Sink:
        from megapipe.observe.tensorboard import TensorboardSink

        return TensorboardSink(run_folder)

    def wandb() -> Sink:
        from megapipe.observe.wandb import WandbSink

        assert config.log.wandb != "off"
        return WandbSink(
            run_folder,
            project=config.log.wandb_project,
            run_name=config.run.name,
            mode=config.log.wandb,
            flat_config=flat_config,
        )

    openers: dict[str, Callable[[], Sink]] = {"log.jsonl": jsonl}
    if config.log.tensorboard:
        openers["tensorboard"] = tensorboard
    if config.log.wandb != "off":
        openers["wandb"] = wandb
    sinks: list[Sink] = [ConsoleSink(sys.stdout, config.log.every)]
    for name, opener in openers.items():
        try:
            sinks.append(opener())
        except Exception as error:
            _warn(name, error)
    return Observer(sinks)


def check_sinks(log: LogConfig) -> None:
    """Raise ConfigError if the package that a switched-on sink needs is not installed."""
    wanted = {"tensorboard": log.tensorboard, "wandb": log.wandb != "off"}
    for package, switched_on in wanted.items():
        if switched_on and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"log.{package} needs the package {package}: pip install {package}, or set "
                f"log.{package}=off"
            )


def _warn(sink: str, error: Exception) -> None:
    reason = without_secrets(" ".join(str(error).split())) or type(error).__name__
    _log.warning("megapipe: %s does not accept records, training continues: %s", sink, reason)
