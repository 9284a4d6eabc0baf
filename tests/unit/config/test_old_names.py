"""Keys by the names that they had in version 0.1: read, told, and rewritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megapipe.cli import flatten, from_mapping, parse, stored_model
from megapipe.config.commands import main
from megapipe.config.config import Config
from megapipe.config.keys import KEYS, MAPPINGS, OPTIONS_OF, field_of
from megapipe.config.old_names import _KEYS, new_name, stored_with_new_names
from megapipe.config.strict_yaml import YamlError, parse_mapping
from megapipe.config.upgrade import upgrade
from megapipe.errors import ConfigError
from megapipe.schedule.generators import accepts, aliases, names
from megapipe.train.resume.changes import compare

OLD = """\
# A run of before.
run:
  name: before  # stays
model:
  layers: 2
  # of long texts
  rotary_base: 500000.0  # Llama 3
  rotary_scaling: llama3
  positions: rotary
  rotary_factor: 8
  rotary_original_positions: 8192
  moe:
    # a few
    experts: 4
    ffn: 32
optimizer:
  beta1: 0.8
  lr: 1e-3
  # slower
  beta2: 0.99
  clip: null
kernels:
  attention: math
numbers:
  # of a node that fails
  spike_factor: 5
  rewinds: 2
parallel:
  layouts:
    half:
      dp: 1
log:
  device: H100
  efficiency: 0.5
"""
NEW = """\
# A run of before.
run:
  name: before  # stays
model:
  layers: 2
  positions: rotary
  moe:
    # a few
    num_experts: 4
    expert_ffn_hidden: 32
  rope:
    # of long texts
    base: 500000.0  # Llama 3
    scaling: llama3
    factor: 8
    original_positions: 8192
optimizer:
  lr: 1e-3
  max_grad_norm: null
  options:
    # slower
    betas: [0.8, 0.99]
kernels:
  only:
    attention: math
health:
  # of a node that fails
  spike_factor: 5
  max_rewinds: 2
parallel:
  elastic_layouts:
    half:
      dp: 1
plan:
  device: H100
  time_factor: 1.2
"""


def test_every_old_name_is_gone_and_every_new_one_is_there() -> None:
    options = {f"{key}.{name}" for key, rule in OPTIONS_OF.items() for name in rule.names()}
    assert not _KEYS.keys() & KEYS.keys()
    assert {*_KEYS.values()} <= {*KEYS, *MAPPINGS, *options}


def test_a_configuration_is_rewritten_with_its_comments() -> None:
    assert upgrade(OLD).text == NEW
    assert upgrade(NEW) == (NEW, {})


def test_it_means_what_it_meant(tmp_path: Path) -> None:
    for name, text in (("old.yaml", OLD), ("new.yaml", NEW)):
        (tmp_path / name).write_text(text)
    old, new = (parse([str(tmp_path / f"{name}.yaml")]) for name in ("old", "new"))
    assert old.config == new.config
    assert new.notice is None
    assert old.notice is not None
    assert "\n" not in old.notice
    assert old.notice.startswith(f"{tmp_path}/old.yaml: old key names")
    assert "optimizer.clip is optimizer.max_grad_norm" in old.notice


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("log:\n  device: H100\n", "plan:\n  device: H100\n"),
        ("log:\n  every: 2\n  device: H100\n", "log:\n  every: 2\nplan:\n  device: H100\n"),
        (
            "plan:\n  device: H100\nlog:\n  device_gb: 1\n  every: 2",
            "plan:\n  device: H100\n  device_gb: 1\nlog:\n  every: 2",
        ),
        (
            "optimizer:\n    rule: sgd\n    momentum: 0.5\n    beta1: 0.5\n",
            "optimizer:\n    rule: sgd\n    options:\n      momentum: 0.5\n",
        ),
        (
            "optimizer:\n  beta2: 0.5\n  rule: rmsprop\n",
            "optimizer:\n  rule: rmsprop\n  options:\n    alpha: 0.5\n",
        ),
        ("{optimizer.clip: 1}", None),
        ("optimizer: {clip: 1, lr: 1}", None),
        ("optimizer: {lr: 1}\ntrain:\n  loss: a:b",
         "optimizer: {lr: 1}\ntrain:\n  loss_function: a:b"),
        ("pipeline:\n  replicas:\n  - 2\n  - 1\n  schedule: 1f1b_rr\n",
         "pipeline:\n  schedule: 1f1b_rr\n  options:\n    ranks_per_stage: [2, 1]\n"),
        ("optimizer.clip: 1\n", "optimizer.max_grad_norm: 1\n"),
    ],
)  # fmt: skip
def test_forms_of_configurations(text: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(YamlError, match="braces"):
            upgrade(text)
        return
    assert upgrade(text).text == expected
    crlf = text.replace("\n", "\r\n")
    assert upgrade(crlf).text == expected.replace("\n", "\r\n")
    assert all(field_of(entry.key) is not None for entry in parse_mapping(expected))


@pytest.mark.parametrize("begin", ["", "# a\u2028# b\u2028# c\n"])
def test_a_text_that_cannot_be_rewritten_is_an_error(begin: str) -> None:
    with pytest.raises(YamlError, match=r"same meaning.* plan\.device=H100 for log\.device$"):
        upgrade(f"{begin}log:\n  device: H100\nplan: {{device_gb: 3}}\n")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(OLD)
    new.write_text(NEW)
    assert main(["upgrade", "--check", str(old), str(new)]) == 2
    assert old.read_text() == OLD
    assert main(["upgrade", str(old), str(new)]) == 0
    assert old.read_text() == NEW
    old.write_text(OLD, newline="\r\n")
    assert main(["upgrade", str(old)]) == 0
    assert old.read_bytes() == NEW.replace("\n", "\r\n").encode()
    shown = capsys.readouterr().out
    assert f"{old}: optimizer.clip is optimizer.max_grad_norm\n" in shown
    assert f"{new}: no old names\n" in shown
    assert main(["upgrade", str(tmp_path / "none.yaml")]) == 2
    new.write_text("optimizer:\n  rule: rmsprop\n  beta1: 0.5\n  beta2: 0.5\n")
    assert main(["upgrade", str(new)]) == 0
    assert new.read_text() == "optimizer:\n  rule: rmsprop\n  options:\n    alpha: 0.5\n"
    assert capsys.readouterr().out.splitlines() == [
        f"{new}: optimizer.beta1 had no effect and is removed",
        f"{new}: optimizer.beta2 is optimizer.options.alpha",
    ]


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        (["optimizer.clip=2"], "optimizer.max_grad_norm", 2.0),
        (["optimizer.max_grad_norm=1", "optimizer.clip=2"], "optimizer.max_grad_norm", 2.0),
        (["optimizer.clip=2", "optimizer.max_grad_norm=1"], "optimizer.max_grad_norm", 1.0),
        (["optimizer.clip=2", "optimizer.max_grad_norm=unset"], "optimizer.max_grad_norm", 1.0),
        (["numbers.spike_factor=2", "numbers.spike_factor=unset"], "health.spike_factor", None),
        (["log.efficiency=0.3"], "plan.time_factor", 2.0),
        (["optimizer.beta1=0.5"], "optimizer.options", '{"betas": [0.5, 0.95], "eps": 1e-08}'),
        (["pipeline.advance=2"], "pipeline.options", '{"extra_warmup": 2}'),
        (["pipeline.pairs=null", "pipeline.schedule=chimera"], "pipeline.options", "{}"),
        (["kernels.expert_rows=torch"], "kernels.only.moe_elementwise", "torch"),
        (["parallel.layouts.a.pp=2", "parallel.layouts.b.pp=1"], "parallel.elastic_layouts", None),
    ],
)
def test_on_the_command_line(given: list[str], key: str, value: Any) -> None:
    command = parse(given)
    found = flatten(command.config)[key]
    if key == "parallel.elastic_layouts":
        assert [*json.loads(str(found))] == ["a", "b"]
        return
    assert found == value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("optimizer.clip=-1", "command line: optimizer.clip=-1: expected a number > 0, or null"),
        ("optimizer.options.betas=[0.9]", "expected two numbers >= 0 and < 1, as in [0.9, 0.95]"),
        ("optimizer.options.momentum=1", "optimizer.rule=adamw has no such option: it has betas"),
        ("optimizer.options.nothing=1", "optimizer.rule=adamw has no such option: it has betas"),
        ("pipeline.options.chimera_pairs=1", "has no such option: it has extra_warmup"),
        ("pipeline.options.extra_warmup=0", "expected a whole number >= 1, or null"),
        ("pipeline.options=2", "expected options of the schedule"),
        ("kernels.without=[magic]", "expected a list of kernels, of apex, "),
        ("kernels.without=apex", "expected a list of kernels, of apex, "),
        ("optimizer.options.betas=3", "command line: optimizer.options.betas=3: expected two"),
        ("optimizer.options.betas=null", "optimizer.options.betas=null: expected two numbers"),
        (
            "optimizer.options.betas=[] optimizer.beta1=0.5 optimizer.beta2=0.5",
            "command line: optimizer.options.betas=[]: expected two numbers >= 0 and < 1",
        ),
        ("optimizer.rule=[a]", "command line: optimizer.rule=[a]: expected one of adamw, "),
        ("pipeline.schedule=[a]", "command line: pipeline.schedule=[a]: expected text"),
        (
            "pipeline.schedule=[a] pipeline.options.extra_warmup=1",
            "command line: pipeline.schedule=[a]: expected text",
        ),
    ],
)
def test_wrong_values(given: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(given.split())
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_mapping_from_python_has_a_notice() -> None:
    command = from_mapping({"optimizer": {"clip": 3.0}}, "here")
    assert "optimizer.clip is optimizer.max_grad_norm" in str(command.notice)
    assert command.config.optimizer.max_grad_norm == 3
    new = {"optimizer": {"max_grad_norm": 3.0, "options": {"eps": 1e-9}}}
    assert from_mapping(new, "here").notice is None


def old_keys(**changes: Any) -> dict[str, Any]:
    """Return keys of a model with experts as version 0.1 wrote them into a checkpoint."""
    stored: dict[str, Any] = {
        "model.layers": 2,
        "model.rotary_base": 500.0,
        "model.rotary_scaling": "none",
        "model.moe.experts": "[4, 8]",
        "model.moe.ffn": 32,
        "model.options": "{}",
        "optimizer.rule": "adamw",
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.99,
        "optimizer.eps": 1e-8,
        "optimizer.momentum": 0.9,
        "optimizer.muon_split": "projections",
        "pipeline.group": None,
        "pipeline.advance": 2,
        "pipeline.replicas": None,
        "parallel.layouts": "{}",
        "log.efficiency": 0.6,
    }
    return stored | changes


def test_keys_of_a_checkpoint() -> None:
    found = stored_with_new_names(old_keys())
    assert not any(map(new_name, found))
    assert json.loads(found["optimizer.options"]) == {"betas": [0.9, 0.99], "eps": 1e-8}
    assert json.loads(found["pipeline.options"]) == {"extra_warmup": 2}
    assert found["plan.time_factor"] == 1
    model = stored_model(found)
    assert (model.rope.base, model.moe.num_experts) == (500.0, [4, 8])
    assert stored_with_new_names(found) is found


def test_keys_of_a_checkpoint_of_muon_and_of_a_rule_of_the_user_s() -> None:
    without = old_keys(**{"optimizer.rule": "muon"})
    del without["optimizer.muon_split"]
    options = json.loads(stored_with_new_names(without)["optimizer.options"])
    assert options["split_qkv"] == "none", "as version 0.1"
    given = stored_with_new_names(old_keys(**{"optimizer.rule": "mine:Rule"}))
    assert given["optimizer.options"] == "{}"


@pytest.mark.parametrize(
    ("rule", "changed"),
    [("rmsprop", {"optimizer.eps": 1e-7}), ("nadamw", {}), ("muon", {}), ("lion", {})],
)
def test_a_checkpoint_of_before_resumes_without_a_change(
    rule: str, changed: dict[str, Any]
) -> None:
    """Options may come in any order; one that a later version adds had its default."""
    every = {
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "optimizer.eps": 1e-8,
        "optimizer.momentum": 0.9,
        "optimizer.momentum_decay": 4e-3,
        "optimizer.nesterov": True,
        "optimizer.trust_coefficient": 1e-3,
        "optimizer.muon_adjust": "match_rms_adamw",
        "optimizer.muon_split": "projections",
        "optimizer.adamw_lr_scale": 1.0,
    }
    stored = {**flatten(Config()), "optimizer.rule": rule, **every, **changed}
    del stored["optimizer.options"]
    found = stored_with_new_names(stored)
    now = parse([f"optimizer.rule={rule}", *(f"{k}={v}" for k, v in changed.items())]).config
    assert compare(found, now) == []
    fewer = json.loads(found["optimizer.options"])
    fewer.pop("eps", None)
    again = {**found, "optimizer.options": json.dumps(fewer)}
    assert len(compare(again, now)) == len(changed)


def test_ranks_per_stage_of_a_checkpoint_of_before() -> None:
    found = stored_with_new_names(
        old_keys(**{"pipeline.replicas": "[2, 1]", "pipeline.advance": None})
    )
    assert json.loads(found["pipeline.options"]) == {"ranks_per_stage": [2, 1]}


def test_defaults_are_written_out_for_registered_rules() -> None:
    kept = flatten(Config())["optimizer.options"]
    assert json.loads(str(kept)) == {"betas": [0.9, 0.95], "eps": 1e-8}
    assert flatten(parse(["optimizer.options.eps=1e-8"]).config)["optimizer.options"] == kept


def test_options_of_schedules_are_what_their_generators_take() -> None:
    sections = OPTIONS_OF["pipeline.options"]
    taken = {"microbatch_group_size", "chimera_pairs", "ranks_per_stage", "extra_warmup"}
    for name in (*names(), *aliases()):
        section = sections.of(name)
        assert section is not None
        has = {*section.model_fields} - {"slice_overhead_tokens"}
        assert has == accepts(name) & taken, name
        assert ("slice_overhead_tokens" in section.model_fields) == ("slices" in accepts(name))
