"""What a preparation tells of its progress."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megapipe.data.prepare import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, which a test may set."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_have_the_pace_and_the_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """What was there already is told once, and says nothing of the pace."""
    with progress.meter("reading texts", 400_000_000) as shown:
        shown.advance(20_000_000, 4, done_before=True)
        shown.advance(30_000_000, 6, done_before=True)
        clock[0] += 100
        shown.advance(150_000_000, 20)
        shown.advance(1, done_before=True)
        clock[0] += 59
        shown.advance(1)
    assert capsys.readouterr().err == (
        "megapipe: reading texts: 10 documents, 50 MB of 400 were already "
        "tokenized\nmegapipe: reading texts: 30 documents, 200 MB of 400, 2 min left, 1.5 "
        "MB/s\n"
    )
    with progress.meter("reading texts", 400) as shown:
        shown.advance(400, 3, done_before=True)
    assert capsys.readouterr().err == (
        "megapipe: reading texts: 3 documents, 0 MB of 0 were already tokenized\n"
    )


def test_the_first_line_comes_after_ten_seconds_and_then_one_a_minute(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    with progress.meter("reading a stream", None) as shown:
        for second in range(1, 140):
            clock[0] += 1
            shown.advance(2_000_000, 1)
            if line := capsys.readouterr().err:
                said.append(second)
                assert line == (
                    f"megapipe: reading a stream: {second} documents, {2 * second} MB, 2.0 MB/s\n"
                )
    assert said == [10, 70, 130]


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "Console", lambda stderr: console)
    with progress.meter("reading texts", 100) as shown:
        shown.advance(40, 1234)
    assert "reading texts: 1,234 documents" in out.getvalue()
    assert " MB/s" in out.getvalue()
