"""Windows: every token scored once, given as much as there is."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.evaluate.windows import windows


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(1, 9), st.data())
def test_each_token_is_scored_once_given_the_most_there_is(
    length: int, context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))
    first = data.draw(st.integers(1, 3))
    ids = [100 + i for i in range(length)]
    scored: list[int] = []
    reads: list[int] = []
    for number, row in enumerate(windows(ids, first=first, context=context, stride=stride)):
        assert row.first >= 1
        assert len(row.ids) - 1 <= context
        assert list(row.ids) == ids[row.ids[0] - 100 : row.ids[-1] - 99]
        if number:
            assert len(row.ids) - 1 == context, "as much as the model sees"
            assert len(row.ids) - row.first <= stride
        scored += row.ids[row.first :]
        reads.append(row.ids[-1])
    assert scored == ids[first:]
    assert reads == sorted(set(reads))


def test_the_example_of_the_docstring() -> None:
    rows = list(windows(range(9), first=1, context=4, stride=2))
    assert [(list(row.ids[:-1]), list(row.ids[row.first :])) for row in rows] == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([2, 3, 4, 5], [5, 6]),
        ([4, 5, 6, 7], [7, 8]),
    ]
