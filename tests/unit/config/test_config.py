"""The configuration tree itself."""

import pytest
from pydantic import ValidationError

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.config.keys import KEYS, SECTIONS, expected, unknown
from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError


def test_sections_are_documented() -> None:
    for name, section in SECTIONS.items():
        assert section.__doc__, name


def test_every_default_is_valid() -> None:
    """Defaults are not validated by themselves; a file that spells them out must be."""
    assert Config.model_validate(Config().model_dump()) == Config()


def test_every_key_has_words_for_its_type() -> None:
    for key, info in KEYS.items():
        assert expected(info), key


def test_every_key_is_found_with_a_letter_missing() -> None:
    for key in KEYS:
        section, _, leaf = key.rpartition(".")
        if len(leaf) > 4:
            assert "did you mean" in unknown(f"{section}.{leaf[:-1]}"), key


def test_frozen_and_strict() -> None:
    with pytest.raises(ValidationError):
        Config().run.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Config.model_validate({"model": {"layers": "3"}})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("parallel.timeout_s=1e300", "number >= 1 and <= 604800"),
        ("parallel.timeout_s=1e12", "number >= 1 and <= 604800"),
        ("parallel.timeout_s=0.001", "number >= 1 and <= 604800"),
        (f"train.steps={2**62}", "number >= 1 and <= 1000000000"),
    ],
)
def test_limits_that_no_run_reaches(given: str, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse([given])
    assert words in str(told.value)


def test_resolved_model() -> None:
    model = ModelConfig(hidden=96, heads=6).resolved(vocab_size=100, sequence_length=32)
    assert (model.kv_heads, model.head_dim, model.ffn_hidden) == (6, 16, 384)
    assert (model.vocab_size, model.max_positions) == (100, 32)
    assert model.resolved(vocab_size=7, sequence_length=7) == model
    swiglu = ModelConfig(hidden=96, activation="swiglu")
    assert swiglu.resolved(vocab_size=100, sequence_length=32).ffn_hidden == 256


def test_a_run_saves_every_quarter_of_an_hour_by_default() -> None:
    checkpoint = Config().checkpoint
    assert (checkpoint.every, checkpoint.every_minutes) == (0, 15)
