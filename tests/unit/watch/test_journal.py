"""What a rank notes is what a monitor reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.watch import journal
from megapipe.watch.journal import Journal, JournalReader, text, unwatched


def test_notes_are_read_as_they_are_made(tmp_path: Path) -> None:
    mine = Journal()
    mine.publish(tmp_path, 3)
    mine.is_at("pp 1, dp 0")
    mine.trains(12)
    mine.set_activity(text("F stage 1 micro-batch 2"))
    one = mine.counter("one", [0, 3])
    other = mine.counter("other", [0, 1, 3], heeds=[0])
    reader = JournalReader(tmp_path / "rank-3")
    assert reader.rank == 3
    assert one.count() == 1
    assert one.count() == 2
    state = reader.read()
    assert (state.step, state.does, state.coordinates) == (
        12,
        "F stage 1 micro-batch 2",
        "pp 1, dp 0",
    )
    assert state.begun == {"one": 2, "other": 0}
    assert state.line is None

    def look() -> journal.JournalState:
        return reader.read()

    state = other.wait(other.count(), look)
    assert (state.line, state.exchange, state.waits_for) == ("other", 1, (0,))
    assert reader.read().line is None
    late = mine.counter("late", [2, 3])
    assert reader.read().begun["late"] == 0, "lines that come later are seen"
    late.count()
    assert reader.read().begun["late"] == 1


def test_only_the_heart_does_not_count_as_a_change(tmp_path: Path) -> None:
    mine = Journal()
    mine.publish(tmp_path, 0)
    reader = JournalReader(tmp_path / "rank-0")
    beats, rest = reader.look()
    mine.words[journal.BEATS] += 1
    assert reader.look() == (beats + 1, rest)
    mine.set_activity(text("else"))
    assert reader.look()[1] != rest


def test_a_verdict_is_heard(tmp_path: Path) -> None:
    mine = Journal()
    mine.publish(tmp_path, 0)
    JournalReader(tmp_path / "rank-0").announce_verdict()
    assert mine.words[journal.VERDICT] == 1


def test_a_rank_that_leaves_needs_no_folder(tmp_path: Path) -> None:
    """It may train on, unwatched, and the monitor has removed the folder."""
    mine = Journal()
    mine.publish(tmp_path, 0)
    reader = JournalReader(tmp_path / "rank-0")
    mine.withdraw()
    assert reader.read().left
    (tmp_path / "rank-0").unlink()
    tmp_path.rmdir()
    mine.counter("late", [0, 1]).count()
    mine.trains(2)


def test_a_wait_that_fails_still_shows_at_whom(tmp_path: Path) -> None:
    mine = Journal()
    mine.publish(tmp_path, 0)
    line = mine.counter("one", [0, 1])

    def fail() -> None:
        raise RuntimeError("a peer is gone")

    with pytest.raises(RuntimeError):
        line.wait(line.count(), fail)
    assert JournalReader(tmp_path / "rank-0").read().line == "one"


def test_more_lines_than_there_is_room_for(tmp_path: Path) -> None:
    mine = Journal()
    mine.publish(tmp_path, 0)
    mine.set_activity(text("this stays"))
    lines = [mine.counter(f"line{number}", [0, number]) for number in range(journal.WORDS + 9)]
    for line in lines:
        line.wait(line.count(), lambda: None)
    state = JournalReader(tmp_path / "rank-0").read()
    assert state.does == "this stays"
    assert state.begun["line5"] == 1


def test_names_have_a_length() -> None:
    assert len(text("é" * 500)) == len(text("")) == journal.TEXT
    line = unwatched()
    assert line.wait(line.count(), lambda: 5) == 5
