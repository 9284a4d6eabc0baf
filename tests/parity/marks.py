"""Which cases of a test are run by default, in CI, and with `-m slow` alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")
Part = int | Collection[Any]
"""Every n-th value, from the first one on, or these values."""


def in_parts(
    names: str | Sequence[str],
    values: Iterable[Any],
    *,
    default: Part = (),
    full: Part = (),
    ids: Callable[[Any], object] | Sequence[str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test: some values are run by default, others in CI, and the rest are slow."""

    def param(number: int, value: Any) -> Any:
        def within(part: Part) -> bool:
            return number % part == 0 if isinstance(part, int) else value in part

        marks = [] if within(default) else [pytest.mark.full if within(full) else pytest.mark.slow]
        return pytest.param(*([value] if isinstance(names, str) else value), marks=marks)

    return pytest.mark.parametrize(
        names, [param(number, value) for number, value in enumerate(values)], ids=ids
    )


def some_or_all(every: int, first: int = 0) -> pytest.MarkDecorator:
    """Parametrize a test by a slice of its list of cases: a part of them is run in CI, and all of
    them are slow."""
    return pytest.mark.parametrize(
        "some",
        [
            pytest.param(slice(first, None, every), marks=pytest.mark.full, id="some"),
            pytest.param(slice(None), marks=pytest.mark.slow, id="all"),
        ],
    )


def selected(
    request: pytest.FixtureRequest, name: str, values: Mapping[Value, Any]
) -> dict[Value, Any]:
    """Those of some values that tests of this module are run with, as their parameter `name`."""
    run = [
        item.callspec.params.get(name)
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
        if hasattr(item, "callspec")
    ]
    return {value: of for value, of in values.items() if value in run}
