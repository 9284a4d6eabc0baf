"""Declarations of update rules, and user-defined classes that are none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.config.update_rules import RULES, Declaration, declaration
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve
from tests.parity.user_rules import MODULE


@pytest.fixture
def _rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "rules.py").write_text(MODULE)
    twice = 'from rules import *\nwrong = Declaration(states=("a", "a"), elementwise=True)\n'
    (tmp_path / "twice.py").write_text(twice)
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("rules", "twice"):
        sys.modules.pop(name, None)


def resolved(*overrides: str) -> None:
    resolve(parse(overrides).config, 1, None)


@pytest.mark.usefixtures("_rules")
def test_a_class_of_the_user_s_declares_what_a_registered_rule_does() -> None:
    assert declaration("rules:Good") == Declaration(("a", "b"), elementwise=True)
    assert declaration("rules:Inherits") is RULES["adamw"]
    resolved("optimizer.rule=rules:Good", "optimizer.post_validation=true")
    resolved("optimizer.rule=rules:Whole", "kernels.only.optimizer=apex")


@pytest.mark.usefixtures("_rules")
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("rules:Silent", "it declares nothing; write declaration = Declaration"),
        ("rules:Nearly", "it has no method 'step'"),
        ("rules:NoRule", "it is not a class derived from megapipe.optim.rules.Rule"),
        ("rules:function", "it is not a class derived from megapipe.optim.rules.Rule"),
        ("rules:Asks", "its parameter mesh needs a default; it can be given config, kernel"),
        ("rules:Missing", "module 'rules' has no class 'Missing'"),
        ("nowhere:Rule", "there is no module 'nowhere' in"),
        ("twice:Good", r"states=\('a', 'a'\): expected different names"),
    ],
)
def test_what_is_no_rule_is_one_line_before_a_start(rule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^configuration: optimizer.rule={rule}: {message}"):
        resolved(f"optimizer.rule={rule}")


@pytest.mark.parametrize("states", [["a"], "a", (1,), ("a", "a"), ("model",), ("a b",), ("",)])
def test_states_that_cannot_be_saved_are_refused(states: object) -> None:
    with pytest.raises(ConfigError, match="states="):
        Declaration(states=states, elementwise=True)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_rules")
@pytest.mark.parametrize("rule", ["muon", "lars", "lamb", "rules:Whole"])
def test_rules_that_are_not_elementwise_cannot_be_undone(rule: str) -> None:
    with pytest.raises(
        ConfigError,
        match="post_validation=true needs optimizer.rule=adamw, adam, sgd, lion, rmsprop, nadamw, "
        f"adabelief or adam3, not {rule}$",
    ):
        resolved(f"optimizer.rule={rule}", "optimizer.post_validation=true")


@pytest.mark.usefixtures("_rules")
@pytest.mark.parametrize("rule", ["sgd", "lion", "lars", "lamb", "nadamw", "rules:Good"])
def test_a_kernel_by_name_is_for_rules_that_take_it(rule: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^configuration: kernels.only.optimizer=apex has no effect without "
        r"optimizer.rule=adamw, adam or muon: expected auto, or that setting$",
    ):
        resolved(f"optimizer.rule={rule}", "kernels.only.optimizer=apex")


@pytest.mark.parametrize("wrong", ["adamm", "AdamW", "my.rules", "a:b:c", "1:2"])
def test_another_name_is_no_rule(wrong: str) -> None:
    with pytest.raises(
        ConfigError,
        match="expected one of adamw, adam, sgd, lion, muon, lars, lamb, rmsprop, nadamw, "
        "adabelief, adam3, or a class of your own as module:Name",
    ):
        parse([f"optimizer.rule={wrong}"])
