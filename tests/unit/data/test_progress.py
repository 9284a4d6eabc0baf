"""What a preparation tells of its progress."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megapipe.data.prepare import progress


def test_lines_have_the_pace_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was there at once says nothing of the pace. A line a minute, on what is no terminal."""
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.meter("reading texts", 400_000_000) as shown:
        shown.advance(50_000_000, 10, at_once=True)
        now += 100
        shown.advance(150_000_000, 20)
        now += 59
        shown.advance(1)
    assert capsys.readouterr().err == (
        "megapipe: reading texts: 30 documents, 200 MB of 400, 2 min left, 1.5 MB/s\n"
    )
    with progress.meter("reading a stream", None) as shown:
        now += 60
        shown.advance(120_000_000, 1)
    assert capsys.readouterr().err == (
        "megapipe: reading a stream: 1 documents, 120 MB, 2.0 MB/s\n"
    )


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "Console", lambda stderr: console)
    with progress.meter("reading texts", 100) as shown:
        shown.advance(40, 1234)
    assert "reading texts: 1,234 documents" in out.getvalue()
    assert " MB/s" in out.getvalue()
