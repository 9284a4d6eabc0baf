"""A key is known by its field alone: what it needs, and its class when a run goes on."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Annotated, Any

import pytest

from megapipe.cli import flatten
from megapipe.config.config import Config, OptimizerConfig
from megapipe.config.keys import KEYS, SECTIONS
from megapipe.config.section import (
    Needs,
    OnResume,
    Section,
    keys_with,
    keys_within,
    needs,
    needs_of,
    on_resume,
    one_of,
)
from megapipe.config.unused_keys import check_effects
from megapipe.errors import ConfigError
from megapipe.train.resume.changes import compare

LISTED_SECTIONS = {"data", "optimizer", "train", "health"}
"""Sections whose keys are listed unless they say otherwise."""
CLASSES = {
    "run.seed": OnResume.ORDER,
    "run.name": OnResume.HARMLESS,
    "model.layers": OnResume.MODEL,
    "model.moe.z_loss_coeff": OnResume.LISTED,
    "lora.rank": OnResume.MODEL,
    "context.algorithm": OnResume.HARMLESS,
    "experts.wire_dtype": OnResume.LISTED,
    "pipeline.weight_versions": OnResume.LISTED,
    "data.source": OnResume.CORPUS,
    "optimizer.rule": OnResume.NEVER,
    "optimizer.lr": OnResume.LISTED,
    "train.loss_function": OnResume.REFUSED,
}


def settings(**sections: dict[str, Any]) -> Any:
    """Return an object with some sections."""
    return SimpleNamespace(**{name: SimpleNamespace(**keys) for name, keys in sections.items()})


def test_every_key_has_a_class_and_sections_that_list_all_are_few() -> None:
    classes = {key: on_resume(section, name) for key, section, name in keys_within(Config)}
    assert classes.keys() == KEYS.keys() == flatten(Config()).keys()
    assert {key: classes[key] for key in CLASSES} == CLASSES
    silent = {name for name, section in SECTIONS.items() if "ON_RESUME" not in vars(section)}
    assert silent == LISTED_SECTIONS


def test_no_key_says_two_classes() -> None:
    for key, info in KEYS.items():
        assert sum(isinstance(rule, OnResume) for rule in info.metadata) <= 1, key


def test_what_keys_need_names_keys_that_there_are() -> None:
    """In its words; and it can be asked of any configuration."""
    seen = 0
    for key, section, name in keys_within(Config):
        for need in needs_of(section).get(name, ()):
            named = re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+", need.words)
            assert set(named) <= KEYS.keys(), f"{key}: {need.words}"
            assert named or "ring" in need.words, f"{key}: {need.words}"
            assert need.is_met(Config()) in (True, False), key
            seen += 1
    assert seen > 80


class Wider(OptimizerConfig):
    """A section with one key more."""

    pull: Annotated[float, needs("optimizer.zero", 3)] = 0.0


class WiderConfig(Config):
    """A configuration with this section."""

    optimizer: Wider = Wider()


def test_a_new_key_is_one_field() -> None:
    """It is refused without what it needs, taken with it, and listed when a run goes on."""
    with pytest.raises(ConfigError) as refused:
        check_effects(WiderConfig(optimizer=Wider(pull=0.5)))
    assert str(refused.value) == (
        "optimizer.pull=0.5 has no effect without optimizer.zero=3: expected 0.0, or that setting"
    )
    now = WiderConfig(optimizer=Wider(pull=0.5, zero=3))
    check_effects(now)
    (change,) = compare(flatten(now) | {"optimizer.pull": 0.25}, now)
    assert str(change) == "optimizer.pull was 0.25 and is 0.5"
    assert change.kind is OnResume.LISTED


class Knobs(Section):
    """A section all of whose keys need one of them."""

    ON_RESUME = OnResume.HARMLESS
    NEEDS = (needs("knobs.on"),)

    on: bool = False
    height: Annotated[int, OnResume.ORDER] = 1
    width: Annotated[int, needs("other.size", above=2)] = 1
    way: Annotated[str, needs("other.kind", "a", "b")] = "auto"


def refusal(other: dict[str, Any], **keys: Any) -> str | None:
    try:
        check_effects(
            SimpleNamespace(knobs=Knobs(**keys), **settings(other=other).__dict__), "knobs"
        )
    except ConfigError as error:
        return str(error).partition(": expected")[0]
    return None


def test_needs_of_a_section_come_before_those_of_its_keys() -> None:
    nothing: dict[str, Any] = {"size": 0, "kind": None}
    all_given = {"height": 2, "width": 2, "way": "x"}
    without = "knobs.height=2, knobs.width=2, knobs.way=x have no effect without knobs.on"
    assert refusal(nothing, **all_given) == without
    assert refusal(nothing, on=True, **all_given) == (
        "knobs.width=2 has no effect without other.size above 2"
    )
    assert refusal({"size": 3, "kind": "c"}, on=True, way="x") == (
        "knobs.way=x has no effect without other.kind=a or b"
    )
    assert refusal({"size": 3, "kind": ["c", "b"]}, on=True, **all_given) is None
    assert refusal(nothing, on=True) is None
    assert [on_resume(Knobs, key) for key in ("on", "height")] == [
        OnResume.HARMLESS,
        OnResume.ORDER,
    ]


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "none", {}])
def test_what_is_no_value_does_not_meet_a_need(value: Any) -> None:
    assert not needs("a.b").is_met(settings(a={"b": value}))


@pytest.mark.parametrize("value", [True, 1, "x", {"x": 1}])
def test_any_other_value_meets_it(value: Any) -> None:
    assert needs("a.b").is_met(settings(a={"b": value}))


def test_needs_in_words() -> None:
    narrow = needs("a.b", None), needs("a.c", other="d")
    assert [each.words for each in narrow] == ["a.b=null", "a a.c other than d"]
    assert one_of(*narrow).words == "a.b=null or a a.c other than d"
    for b, c, met in ((None, "d", True), (1, "e", True), (1, "d", False)):
        assert one_of(*narrow).is_met(settings(a={"b": b, "c": c})) is met


def test_only_a_key_that_may_leave_a_choice_takes_auto_without_effect() -> None:
    """A text may happen to be this word."""
    config = Config.model_validate({"experts": {"dispatch": "auto", "overlap_chunks": "auto"}})
    check_effects(config)
    with pytest.raises(ConfigError, match=r"^log\.wandb_project=auto has no effect"):
        check_effects(Config.model_validate({"log": {"wandb_project": "auto"}}))


def test_keys_with_a_rule() -> None:
    rule = Needs("x", lambda config: True)

    class Some(Section):
        a: Annotated[int, rule] = 1
        b: int = 1
        c: Annotated[int, OnResume.LISTED, rule] = 1

    assert keys_with(Some, rule) == ["a", "c"]
