import json
import logging
from pathlib import Path

import pytest

from megapipe.config.config import Config, LogConfig
from megapipe.errors import ConfigError
from megapipe.observe import Observer, build_sinks, check_sinks
from megapipe.observe.jsonl import JsonlSink
from tests.parity.observed import VALIDATION


class RecordingSink:
    """A sink that keeps what it is given, and raises while ``broken``."""

    def __init__(self, name="recording", broken=False):
        self.name = name
        self.broken = broken
        self.taken = []

    def _take(self, what):
        if self.broken:
            raise OSError("no space\nleft")
        self.taken.append(what)

    def step(self, record):
        self._take(("step", record.step))

    def validation(self, record):
        self._take(("validation", record.step, record.steps, record.loss))

    def note(self, text):
        self._take(("note", text))

    def close(self):
        self._take("closed")


def test_every_sink_takes_every_record(make_record):
    sinks = [RecordingSink("a"), RecordingSink("b")]
    observer = Observer(sinks)
    observer.step(make_record())
    observer.validation(VALIDATION)
    observer.note("saved")
    observer.close()
    for sink in sinks:
        assert sink.taken == [
            ("step", 7),
            ("validation", 7, 300, 2.5),
            ("note", "saved"),
            "closed",
        ]


def test_a_failing_sink_warns_once_and_is_tried_again(make_record, caplog):
    broken, sound = RecordingSink("broken", broken=True), RecordingSink("sound")
    observer = Observer([broken, sound])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            broken.broken = step < 3
            observer.step(make_record(step=step))
    assert broken.taken == [("step", 3)]
    assert sound.taken == [("step", 1), ("step", 2), ("step", 3)]
    assert [record.getMessage() for record in caplog.records] == [
        "megapipe: broken does not accept records, training continues: no space left"
    ]


def test_a_closed_log_file_does_not_stop_the_run(tmp_path, make_record, caplog):
    sink = JsonlSink(tmp_path / "log.jsonl")
    sink.close()
    observer = Observer([sink])
    observer.step(make_record())
    observer.close()
    assert len(caplog.records) == 1


def test_console_and_log_are_on_by_default(tmp_path, make_record, capsys):
    observer = build_sinks(Config(), tmp_path, {})
    observer.step(make_record())
    observer.validation(VALIDATION)
    observer.close()
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["steps"]) for line in lines] == [("step", 300), ("validation", 300)]


def test_a_full_disk_from_the_start_does_not_stop_the_run(
    tmp_path, make_record, monkeypatch, capsys, caplog
):
    monkeypatch.setattr(
        "megapipe.observe.jsonl.open_no_symlinks",
        lambda folder, name, mode, **how: Path("/dev/full").open(mode, **how),  # noqa: SIM115
    )
    observer = build_sinks(Config(), tmp_path, {})
    for step in (1, 2):
        observer.step(make_record(step=step))
    observer.close()
    assert len(capsys.readouterr().out.splitlines()) == 2
    (warning,) = caplog.records
    assert "log.jsonl does not accept records" in warning.getMessage()
    assert "No space left" in warning.getMessage()


def test_a_sink_that_cannot_be_opened_is_left_out(tmp_path, make_record, capsys, caplog):
    observer = build_sinks(Config(), tmp_path / "gone", {})
    observer.step(make_record())
    observer.close()
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert "log.jsonl" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("log", "package"),
    [(LogConfig(tensorboard=True), "tensorboard"), (LogConfig(wandb="offline"), "wandb")],
)
def test_a_missing_package_is_a_configuration_error(log, package, monkeypatch):
    check_sinks(log)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_sinks(LogConfig())
    with pytest.raises(ConfigError, match=f"^log.{package} .*pip install {package}"):
        check_sinks(log)


def test_tensorboard_events_hold_the_metrics(tmp_path, make_record):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    observer = build_sinks(Config(log=LogConfig(tensorboard=True)), tmp_path, {})
    observer.step(make_record(step=7, mfu=None))
    observer.step(make_record(step=8, loss=2.25, mfu=None))
    observer.validation(VALIDATION)
    observer.note("saved step 8")
    observer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/lr", "speed/tokens_per_second", "validation/loss"} <= tags
    assert "speed/mfu" not in tags
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (7, pytest.approx(2.34567)),
        (8, 2.25),
    ]
    assert [event.value for event in events.Scalars("validation/loss")] == [2.5]


def test_tensorboard_shows_steps_that_are_made_again_once(tmp_path, make_record):
    """A start resumes after step 2 of 4, and rewinds to step 3."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ((1, 2, 3, 4), (3, 4, 5, 4, 5)):
        observer = build_sinks(Config(log=LogConfig(tensorboard=True)), tmp_path, {})
        observer.note("begins")
        for number, step in enumerate(steps):
            observer.step(make_record(step=step, loss=float(number), mfu=None))
        observer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (5, 4.0)]


def test_wandb_gets_no_secrets():
    from megapipe.observe.wandb import public

    flat_config = {
        "run.seed": 1,
        "data.source": "https://me:hunter2@example.org/corpus",
        "data.tokenizer": "byte",
        "log.api_key": "hunter2",
        "hub.token": "hunter2",
    }
    assert public(flat_config) == {
        "run.seed": 1,
        "data.source": "https://example.org/corpus",
        "data.tokenizer": "byte",
    }
