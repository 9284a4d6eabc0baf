"""Keys without effect are refused in one line, with their defaults."""

from __future__ import annotations

import pytest

from megapipe.config.config import Config
from megapipe.config.data import DataConfig, MixtureSource
from megapipe.config.unused_keys import refuse_unused
from megapipe.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "instead", "line"),
    [
        (
            ["subset"],
            ", or that setting",
            "x.subset=en has no effect without it: expected null, or that setting",
        ),
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


def test_keys_of_inner_sections_and_entries_of_mappings_are_named_in_full() -> None:
    data = DataConfig(
        validation={"wiki": "x", "web": "y"}, mixture={"a": MixtureSource(source="z", tokens=9)}
    )
    config = Config(data=data)
    keys = ["data.validation", "data.test", "data.mixture.a.tokens", "model.moe.top_k"]
    with pytest.raises(ConfigError) as refused:
        refuse_unused("", config, keys, "here", right="nothing of it")
    assert str(refused.value) == (
        "data.validation.wiki=x, data.validation.web=y, data.mixture.a.tokens=9 have no effect "
        "here: expected nothing of it"
    )


def test_a_default_is_no_value() -> None:
    refuse_unused("data", DataConfig(mixture={}), ["text_field", "mixture"], "without it")
