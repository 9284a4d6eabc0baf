"""Keys without effect are refused in one line, with their defaults."""

from __future__ import annotations

import pytest

from megapipe.data_config import DataConfig
from megapipe.errors import ConfigError
from megapipe.unused_keys import refuse_unused


@pytest.mark.parametrize(
    ("keys", "instead", "line"),
    [
        (["subset"], ", or that", "x.subset=en has no effect without it: expected null, or that"),
        (
            ["text_field", "subset", "fim_tokens"],
            "",
            "x.subset=en, x.fim_tokens=[a, b, c] have no effect without it: expected null and null",
        ),
    ],
)
def test_all_of_them_are_in_one_line(keys: list[str], instead: str, line: str) -> None:
    data = DataConfig(subset="en", fim_tokens=["a", "b", "c"])
    with pytest.raises(ConfigError) as refused:
        refuse_unused("x", data, keys, "without it", instead)
    assert str(refused.value) == line


def test_a_default_is_no_value() -> None:
    refuse_unused("data", DataConfig(mixture={}), ["text_field", "mixture"], "without it")
