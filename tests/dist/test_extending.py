"""The examples of docs/extending.md train, as train.py is started by hand."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megapipe.config import Config, DataConfig, OptimizerConfig
from megapipe.data.given import TEXT_KEYS
from megapipe.data.own import ARGUMENTS as DATA_ARGUMENTS
from megapipe.data.own import OF_TEXTS
from megapipe.distributed.mesh import Axis
from megapipe.layout.lr_plan import ARGUMENTS as PLAN_ARGUMENTS
from megapipe.optim.rules import build_rule
from megapipe.update_rules import Declaration
from tests.parity.jobs import ROOT, Outcome, arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.optim_rules import (
    RATES,
    assemble,
    draw,
    error,
    make_shard,
    model,
    set_grad,
    torch_rule,
)
from tests.parity.optim_rules import Part as Result

PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)}
KEYS = {"Norm": "norm", "Update rule": "rule", "Learning rate": "schedule", "Data set": "source"}
"""Sections with an example, and the key that names it."""


def example(section: str) -> tuple[str, str, str]:
    """Its module's name, its source, and the setting that names it."""
    (source,) = re.findall(r"^```python\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL)
    (setting,) = re.findall(rf"`(\w+\.{KEYS[section]}=\w+:\w+)`", SECTIONS[section])
    module = setting.partition("=")[2].partition(":")[0]
    assert source.startswith(f'"""{module}.py: ')
    return module, source, setting


def train(folder: Path, world: int, *overrides: str) -> Outcome:
    """Train in `folder`."""
    settings = {**tiny(folder), "optimizer.lr": "1e-2", "train.steps": "4"}
    del settings["data.cache"]
    return run_forked(folder, world, *arguments(settings), *overrides)


def log(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "runs/run/log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "step"]


def prepare_plain(folder: Path) -> None:
    """Files that the example of a data set reads."""
    draw = np.random.default_rng(7)
    for split, tokens in (("train", 2000), ("validation", 200)):
        draw.integers(0, 257, tokens).astype(np.uint16).tofile(folder / f"{split}.bin")


@pytest.mark.parametrize(
    ("section", "overrides"),
    [
        ("Norm", ["parallel.dp=1", "parallel.tp=2", "parallel.sequence_parallel=true"]),
        pytest.param("Update rule", ["optimizer.zero=2"], marks=pytest.mark.full),
        pytest.param("Learning rate", ["optimizer.warmup_steps=2"], marks=pytest.mark.slow),
        pytest.param("Data set", [], marks=pytest.mark.full),
    ],
)
def test_an_example_trains_and_goes_on(section: str, overrides: list[str], tmp_path: Path) -> None:
    """On two ranks, planned and in two starts."""
    module, source, setting = example(section)
    (tmp_path / f"{module}.py").write_text(source)
    prepare_plain(tmp_path)
    planned = train(tmp_path, 2, setting, "parallel.dp=2", *overrides, "--dry-run")
    assert "\nmemory        at most, per process" in planned.text
    for start in (["train.stop_after=2"], []):
        outcome = train(tmp_path, 2, setting, "parallel.dp=2", *overrides, *start)
        assert set(outcome.codes) == {0}, outcome.text
    assert [step["step"] for step in log(tmp_path)] == [1, 2, 3, 4]
    assert "resumed from" in outcome.text
    if section == "Learning rate":
        rates = [0.5, 1.0, (2 / 3) ** 0.5, 0.5**0.5]
        assert [step["lr"] for step in log(tmp_path)] == pytest.approx([1e-2 * x for x in rates])
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert (summary["unigram_entropy"] is None) == (section == "Data set")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.norm=mine:half", "it is called with (x, weight, bias, eps): too many"),
        ("model.norm=mine:first", "it returns [16]"),
        ("optimizer.rule=mine:half", "it is no class that is derived from"),
        ("optimizer.schedule=mine:half", "it returned -0.5 for step 1 of 4: expected a finite"),
    ],
)
def test_what_is_wrong_with_code_is_one_line_of_the_job(
    setting: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def half(step):\n    return -0.5\ndef first(x, weight, bias, eps):\n    return x[0, 0]\n"
    )
    outcome = train(tmp_path, 2, setting, "parallel.dp=2", "optimizer.warmup_steps=null")
    outcome.assert_one_line(2, setting, words)


def test_an_error_of_one_rank_s_sample_ends_the_job(tmp_path: Path) -> None:
    """A sample that nobody has looked at before its step."""
    (tmp_path / "mine.py").write_text(
        "class Set:\n"
        "    def __init__(self, split, sequence_length):\n"
        "        self.length = sequence_length + 1\n"
        "    def __len__(self):\n"
        "        return 1000\n"
        "    def __getitem__(self, i):\n"
        "        return [i % 7] * (self.length - (i % 3 == 1 and i not in PROBED))\n"
        f"PROBED = {np.linspace(0, 999, 16).astype(int).tolist()}\n"
    )
    outcome = train(tmp_path, 2, "data.source=mine:Set", "parallel.dp=2")
    outcome.assert_one_line(3, "data.source=mine:Set: sample ", "has token ids int64 [16]: exp")


def test_examples_are_as_short_as_they_should_be() -> None:
    for section in KEYS:
        assert len([x for x in example(section)[1].splitlines() if x]) <= 10, section


def test_the_tables_name_what_there_is() -> None:
    def first_cells(section: str) -> set[str]:
        rows = re.findall(r"^\| (`.*?) \|", SECTIONS[section], re.MULTILINE)
        return set(re.findall(r"`([\w.]+)`", " ".join(rows)))

    assert first_cells("Update rule") == set(Declaration.__dataclass_fields__) - {"name"}
    assert first_cells("Learning rate") == set(PLAN_ARGUMENTS)
    words = set(re.findall(r"`([\w.]+)`", SECTIONS["Data set"]))
    assert words >= set(DATA_ARGUMENTS)
    refused = (*TEXT_KEYS, *OF_TEXTS)
    assert {f"data.{refused[0]}", *refused[1:]} <= words
    assert set(refused) <= set(DataConfig.model_fields)
    for key in re.findall(r"^\| `(\w+\.\w+)` \|", PAGE, re.MULTILINE):
        section, _, name = key.partition(".")
        assert name in getattr(Config(), section).model_dump()


def write_rule(folder: Path) -> str:
    module, source, setting = example("Update rule")
    (folder / f"{module}.py").write_text(source)
    return setting.partition("=")[2]


def test_the_rule_of_the_example_is_adagrad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = OptimizerConfig(rule=write_rule(tmp_path), eps=1e-6, weight_decay=0.0)
    rule = build_rule(config)
    sys.modules.pop("my_rules")
    shard = make_shard(rule, Axis.alone(), Axis.alone())
    grads = [draw(model(), "grad", count, torch.float64) for count in range(len(RATES))]
    for count, (lr, grad) in enumerate(zip(RATES, grads, strict=True)):
        set_grad(shard, grad, torch.float64)
        rule.step([shard], lr, count)
    master = shard.store.read("model", 0, shard.stop - shard.start).numpy()
    found = assemble([Result(0, master, [tuple(entry) for entry in shard.bucket.entries])])
    plain: Callable[..., dict[str, torch.Tensor]] = torch_rule(torch.optim.Adagrad, eps=1e-6)
    wanted = plain(draw(model(), "weight", 0, torch.float64), config, grads)
    assert error(found, wanted) < 1e-12
