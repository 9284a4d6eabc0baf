"""Functions and other statements of source files, by line."""

from __future__ import annotations

import pytest

from tests.running.functions import line_range, parse

SOURCE = '''\
"""A docstring."""
import os

@cache
def first(x: int) -> int:
    def inner() -> int:
        return x
    return inner()

# a comment
class Room(Base):
    """Another docstring."""
    size = 1

    async def enter(self) -> None:
        pass

    def leave(self) -> None: ...

if os:
    def second() -> None:
        pass
else:
    def second() -> None:
        print()
'''


def test_functions_are_found_with_what_is_in_them() -> None:
    functions = parse(SOURCE).functions
    assert {name: function.span for name, function in functions.items()} == {
        "first": line_range(4, 8),
        "Room.enter": line_range(15, 16),
        "Room.leave": line_range(18, 18),
        "second": line_range(21, 22) | line_range(24, 25),
    }


def test_a_body_has_no_line_that_an_import_executes() -> None:
    functions = parse(SOURCE).functions
    assert {name: function.body for name, function in functions.items()} == {
        "first": line_range(6, 8),
        "Room.enter": line_range(16, 16),
        "Room.leave": 0,
        "second": line_range(22, 22) | line_range(25, 25),
    }


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (1, []),
        (2, None),
        (3, []),
        (4, ["first"]),
        (7, ["first"]),
        (10, []),
        (11, None),
        (12, []),
        (13, None),
        (16, ["Room.enter"]),
        (20, None),
        (25, ["second"]),
    ],
)
def test_a_line_is_in_a_function_or_a_statement(line: int, names: list[str] | None) -> None:
    assert parse(SOURCE).functions_at(1 << line) == names


def test_other_statements_count_more_than_functions() -> None:
    source = parse(SOURCE)
    assert source.functions_at(line_range(6, 16)) is None
    assert source.functions_at(line_range(14, 18)) == ["Room.enter", "Room.leave"]
