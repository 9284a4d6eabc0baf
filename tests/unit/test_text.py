"""Tables and lines as wide as a terminal."""

import sys
from collections.abc import Callable

import pytest

from megapipe.text import ANY_WIDTH, columns, folded, table


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes stdout a terminal of `columns` columns."""

    def make(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))

    return make


ROWS = [["", "chunks", "makespan", "held"], ["zb_v", "2", "25.5", "4"], ["gems", "1", "73.15", "2"]]


def test_a_table_leaves_out_the_columns_that_a_terminal_has_no_room_for(
    terminal: Callable[[int], None],
) -> None:
    whole = table(ROWS, left=1)
    assert whole.splitlines()[1] == "zb_v       2      25.5     4"
    terminal(27)
    lines = table(ROWS, left=1).splitlines()
    assert lines[:3] == [line[:22] for line in whole.splitlines()]
    assert lines[3].startswith("no room for: held (")
    assert all(len(line) <= 27 for line in lines[3:])
    terminal(3)
    assert table(ROWS, left=1).splitlines()[:3] == ["", "zb_v", "gems"]


def test_a_pipe_has_any_width_unless_it_is_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("", "wide"):
        monkeypatch.setenv("COLUMNS", asked)
        assert columns() == ANY_WIDTH
    monkeypatch.setenv("COLUMNS", "70")
    assert columns() == 70


def test_lines_that_are_too_wide_go_on_behind_their_label(
    terminal: Callable[[int], None],
) -> None:
    text = (
        "model         4 layers, hidden 128, 4 heads of 32\n"
        "short\n"
        "the same stages: pipeline.stage_layout='E L | L | L H'\n"
        f"rank 0 {'x' * 60}\n"
    )
    assert folded(text) == text, "a pipe gets lines as they are"
    terminal(44)
    assert folded(text) == (
        "model         4 layers, hidden 128, 4 heads\n"
        "              of 32\n"
        "short\n"
        "the same stages: pipeline.stage_layout='E L\n"
        "  | L | L H'\n"
        "rank 0\n"
        f"  {'x' * 60}\n"
    )
