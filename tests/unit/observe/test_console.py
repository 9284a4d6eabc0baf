import io
import re
from dataclasses import replace
from datetime import datetime

import pytest

from megapipe.observe import ValidationRecord
from megapipe.observe.console import ConsoleSink, duration, step_line, validation_line
from megapipe.observe.record import SourceRecord
from megapipe.observe.routing_record import RoutingRecord


def test_a_step_line_shows_every_value(make_record):
    assert step_line(make_record()) == (
        "step   7/300 |   224 samples | loss  2.3457 | lr 3.00e-04 | grad norm    0.812"
        " |    412 ms | 19.9k tok/s |  521.3 GFLOP/s | MFU 41.3% |   1.21 GiB | ETA 2:01"
    )
    assert " GiB | 3 skipped | ETA" in step_line(make_record(skipped_steps=3))


def test_a_step_line_tells_how_evenly_tokens_are_spread_over_experts(make_record):
    routing = RoutingRecord(
        aux_loss=1.25,
        z_loss=0.5,
        dropped_fraction=0.0625,
        max_load=2.0,
        idle_experts=1,
        max_bias=None,
    )
    assert " GiB | aux loss 1.250 | 6.2% dropped | ETA" in step_line(make_record(routing=routing))
    whole = replace(routing, dropped_fraction=0.0)
    assert " GiB | aux loss 1.250 | ETA" in step_line(make_record(routing=whole))


def test_unknown_values_are_left_out(make_record):
    line = step_line(make_record(tflops_per_device=None, mfu=None, memory_gib=None))
    assert line.endswith("tok/s | ETA 2:01")


def test_lines_of_one_run_are_aligned(make_record):
    changes = [
        {"step": 1, "loss": 11.0301, "grad_norm": 1234.5, "tokens_per_second": 998.7, "samples": 1},
        {"step": 300, "loss": 0.0123, "grad_norm": 1.5e-5, "tokens_per_second": 1.2e7},
        *({"tflops_per_device": speed} for speed in (0.0002324, 7.807e-05, 412.36, 1234.56)),
    ]
    lines = [step_line(make_record(**each)) for each in changes]
    columns = [[i for i, c in enumerate(line) if c == "|"] for line in lines]
    assert columns == [columns[0]] * len(lines)


@pytest.mark.parametrize(
    ("tflops", "text"),
    [
        (1234.56, "  1235 TFLOP/s"),
        (412.36, " 412.4 TFLOP/s"),
        (1.0, "     1 TFLOP/s"),
        (0.0002324, " 232.4 MFLOP/s"),
        (7.807e-05, " 78.07 MFLOP/s"),
        (3.2e-08, "    32 kFLOP/s"),
    ],
)
def test_a_speed_has_the_unit_that_suits_it(make_record, tflops, text):
    assert f"| {text} |" in step_line(make_record(tflops_per_device=tflops))


def test_the_longest_line_stays_under_190_columns(make_record):
    line = step_line(
        make_record(
            step=1_000_000,
            steps=1_000_000,
            loss=1234.5678,
            grad_norm=1.234e-12,
            seconds=99.999,
            tokens_per_second=123_456_789.0,
            tflops_per_device=1234.56,
            mfu=1.0,
            memory_gib=1234.56,
            eta_seconds=99 * 86400.0,
            samples=123_456_789_000,
            skipped_steps=1000,
        )
    )
    assert len(line) < 190


def test_a_loss_that_is_not_a_number_is_shown(make_record):
    assert "loss     nan" in step_line(make_record(loss=float("nan")))


def test_a_validation_line_starts_like_a_step_line(make_record):
    line = validation_line(ValidationRecord(step=7, steps=300, loss=2.5, seconds=1.26))
    assert line == "step   7/300 | loss  2.5000 on held-out text | 1.3 s"
    assert step_line(make_record()).startswith(line[: len("step   7/300 |")])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (90061, "1d 01:01")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.4, "0"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (19868, "19.9k"),
        (999_600, "1.00M"),
        (5e9, "5.00G"),
    ],
)
def test_tokens_per_second_fit_their_column(make_record, number, text):
    assert f"| {text:>5} tok/s |" in step_line(make_record(tokens_per_second=number))


def test_every_nth_step_is_shown_and_the_first_and_the_last(make_record):
    stream = io.StringIO()
    sink = ConsoleSink(stream, every=10)
    for step in range(3, 26):
        sink.step(make_record(step=step, steps=25))
    shown = [int(line.split()[3].split("/")[0]) for line in stream.getvalue().splitlines()]
    assert shown == [3, 10, 20, 25]


def test_every_line_begins_with_its_date(make_record):
    stream = io.StringIO()
    sink = ConsoleSink(stream, now=lambda: datetime(2026, 2, 3, 4, 5, 6, 789))
    sink.note("a note")
    sink.step(make_record())
    sink.validation(ValidationRecord(step=7, steps=300, loss=2.5, seconds=1.26))
    lines = stream.getvalue().splitlines()
    assert [line[:20] for line in lines] == ["2026-02-03 04:05:06 "] * 3
    assert lines[0].endswith(" a note")


class Screen(io.StringIO):
    """A terminal that shows what was written to it, as far as lines and their erasure go."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())
        return [line.rpartition("\r\x1b[2K")[2] for line in plain.split("\n")]


@pytest.fixture(params=[80, 100, 200])
def columns(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return request.param


def test_a_step_is_one_line_of_a_terminal(make_record, columns):
    screen = Screen()
    sink = ConsoleSink(screen)
    widest = {"step": 99_999, "steps": 100_000, "loss": 11.1234, "grad_norm": 1.2e-5}
    sources = {"code": SourceRecord(2.5, 100, 1), "text": SourceRecord(3.5, 200, 2)}
    sink.step(make_record(**widest, sources=sources))
    line, bar = screen.lines()
    assert len(line) <= columns
    assert "loss 11.1234 |" in line
    assert "19.9k tok/s" in line
    assert ("MFU 41.3%" in line) == (columns == 200), "what matters least leaves first"
    assert re.fullmatch(r"100% [━╸╺ ]+ 2:01 left *", bar)
    assert len(bar) <= columns


def test_beneath_the_lines_is_a_bar_with_the_time_left(make_record, columns):
    screen = Screen()
    sink = ConsoleSink(screen, every=10)
    sink.note("a line of " + "many words " * 30)
    before = len(screen.lines())
    assert all(len(line) <= columns for line in screen.lines())
    for step in range(1, 13):
        sink.step(make_record(step=step, steps=24))
    *_, first, tenth, bar = screen.lines()
    assert len(screen.lines()) == before + 2
    assert " step  1/24 | " in first
    assert " step 10/24 | " in tenth
    sink.phase("validating ...")
    *_, bar = screen.lines()
    assert re.fullmatch(r" 50% ━+.* validating \.\.\. *", bar)
    sink.validation(ValidationRecord(step=12, steps=24, loss=2.5, seconds=1.26))
    *_, told, bar = screen.lines()
    assert "held-out text" in told
    assert "validating" in bar
    sink.close()
    assert screen.lines()[-1] == "", "the bar is gone"


@pytest.mark.parametrize("stream", [io.StringIO, Screen])
def test_what_is_no_terminal_gets_whole_lines_without_codes(make_record, monkeypatch, stream):
    monkeypatch.setenv("TERM", "dumb")
    written = stream()
    sink = ConsoleSink(written)
    sink.step(make_record())
    sink.phase("validating ...")
    sink.close()
    (line,) = written.getvalue().splitlines()
    assert line[20:] == step_line(make_record())


def test_colours_are_left_out_where_they_are_not_wanted(make_record, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen()
    ConsoleSink(screen).step(make_record())
    assert "\x1b[3" not in screen.getvalue()
