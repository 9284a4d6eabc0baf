"""Which cases of a test run by default, in CI, or only with `-m slow`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from tests.parity import draw

Value = TypeVar("Value")
Part = int | Collection[Any]
"""A number n: every n-th value, where the commit draws the first (:mod:`tests.parity.draw`). Or
these values."""


def in_parts(
    names: str | Sequence[str],
    values: Iterable[Any],
    *,
    default: Part = (),
    full: Part = (),
    ids: Callable[[Any], object] | Sequence[str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test: some values run by default, others in CI, and the rest are slow.

    A part that is a number n is drawn: it has every n-th value, from another start for each commit,
    so that all values have their turn.
    """
    listed = list(values)

    def within(part: Part, position: int) -> bool:
        if isinstance(part, int):
            return position % part == draw.number(min(part, len(listed)), names, len(listed))
        return listed[position] in part

    def param(position: int) -> Any:
        marks = [pytest.mark.full if within(full, position) else pytest.mark.slow]
        value = listed[position]
        return pytest.param(
            *([value] if isinstance(names, str) else value),
            marks=[] if within(default, position) else marks,
        )

    return pytest.mark.parametrize(names, [param(i) for i in range(len(listed))], ids=ids)


def one_of(parts: int) -> pytest.MarkDecorator:
    """Parametrize a test by a slice of its list of cases. CI runs one of `parts` slices, which the
    commit draws; the others are slow."""
    return in_parts(
        "some",
        [slice(first, None, parts) for first in range(parts)],
        full=parts,
        ids=[f"{first} of {parts}" for first in range(parts)],
    )


def selected(
    request: pytest.FixtureRequest, name: str, values: Mapping[Value, Any]
) -> dict[Value, Any]:
    """Return the values with which tests of this module run, as their parameter `name`."""
    run = [
        item.callspec.params.get(name)
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
        if hasattr(item, "callspec")
    ]
    return {value: of for value, of in values.items() if value in run}
