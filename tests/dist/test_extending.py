"""The examples of docs/extending.md train, as train.py is started by hand."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch

from megapipe.checkpoint.reader import Checkpoint
from megapipe.config.config import Config, DataConfig, OptimizerConfig
from megapipe.config.update_rules import Declaration
from megapipe.data.token_file_corpus import TEXT_KEYS
from megapipe.data.user_dataset import ARGUMENTS as DATA_ARGUMENTS
from megapipe.data.user_dataset import OF_TEXTS
from megapipe.distributed.mesh import Axis
from megapipe.layout.user_lr_schedule import ARGUMENTS as PLAN_ARGUMENTS
from megapipe.optim.rules import build_rule
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
KEYS = {
    "Norm": "norm",
    "Router": "score_function",
    "Dispatcher": "dispatch",
    "Update rule": "rule",
    "Learning rate": "schedule",
    "Data set": "source",
}
"""Sections with an example, and the key that names it."""


def example(section: str) -> tuple[str, str, str]:
    """Return the name of a section's module, its source, and the setting that names it."""
    (source,) = re.findall(r"^```python\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL)
    (setting,) = re.findall(rf"`([\w.]+\.{KEYS[section]}=\w+:\w+)`", SECTIONS[section])
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
    """Write the files that the example of a data set reads."""
    draw = np.random.default_rng(7)
    for split, tokens in (("train", 2000), ("validation", 200)):
        draw.integers(0, 257, tokens).astype(np.uint16).tofile(folder / f"{split}.bin")


EXPERTS = (
    "model.moe.num_experts=4 model.moe.expert_ffn_hidden=12 model.moe.aux_loss_coeff=0.3 "
    "model.moe.z_loss_coeff=0.05 model.moe.capacity_factor=1.5"
)
EXPERT_LAYOUTS = (
    "parallel.dp=2 parallel.ep=2",
    "parallel.dp=4 parallel.ep=2 parallel.etp=2 experts.overlap_chunks=2 optimizer.zero=3",
    (
        "parallel.pp=2 parallel.dp=2 parallel.ep=2 pipeline.schedule=zb_h1 "
        "experts.pad_to_capacity=true"
    ),
    "parallel.tp=2 parallel.sequence_parallel=true parallel.dp=2 parallel.ep=4",
)
LAYOUTS = (
    "parallel.tp=2 parallel.sequence_parallel=true",
    "parallel.pp=2 pipeline.schedule=zb_h1",
    "parallel.dp=4 optimizer.zero=3",
    "parallel.cp=2 parallel.dp=2",
)
PIPELINES = (
    "parallel.pp=2",
    "parallel.pp=2 parallel.tp=2",
    "parallel.pp=2 parallel.dp=2 optimizer.zero=2",
    "parallel.pp=2 parallel.cp=2",
)
FEATURES = {
    "Norm": ("", LAYOUTS),
    "Router": (EXPERTS, EXPERT_LAYOUTS),
    "Dispatcher": (EXPERTS, EXPERT_LAYOUTS),
    "Update rule": ("", LAYOUTS),
    "Schedule": ("", PIPELINES),
}
"""Keys of all runs of a section, and layouts. The schedule is the example of docs/schedules.md."""
ONLY_SPLIT = ("Dispatcher", "Schedule")
"""Features that a single process has no use for."""


def write_feature(section: str, folder: Path) -> str:
    """Write the example of a section, and return the setting that names it."""
    if section == "Schedule":
        page = (ROOT / "docs/schedules.md").read_text(encoding="utf-8")
        source = re.findall(r"^```python\n(\"\"\"my_schedules.*?)^```$", page, re.M | re.S)[0]
        module, setting = "my_schedules", "pipeline.schedule=my_schedules:grouped_w"
    else:
        module, source, setting = example(section)
    (folder / f"{module}.py").write_text(source)
    return setting


def world_of(layout: str) -> int:
    sizes = dict(re.findall(r"parallel\.(dp|tp|pp|cp)=(\d)", layout))
    return int(np.prod([int(size) for size in sizes.values()]))


def trained(folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return a run's steps as logged, and its last weights and states."""
    checkpoint = Checkpoint.open(max((folder / "runs/run/checkpoints").iterdir()))
    names = [name for name in checkpoint.names() if not name.startswith("rng")]
    return log(folder), {name: checkpoint.read(name) for name in names}


@pytest.mark.parametrize(
    "section",
    [
        "Router",
        *(pytest.param(each, marks=pytest.mark.full) for each in FEATURES if each != "Router"),
    ],
)
def test_a_feature_from_outside_is_in_every_layout_what_it_is_in_one_process(
    section: str, tmp_path: Path
) -> None:
    """Planned, trained in four layouts, each of which goes on from another one's checkpoint."""
    keys, layouts = FEATURES[section]

    def run(folder: Path, layout: str, *more: str) -> Outcome:
        folder.mkdir(exist_ok=True)
        setting = write_feature(section, folder)
        named = [setting] if layout or section not in ONLY_SPLIT else []
        given = ["model.dtype=fp64", *keys.split(), *layout.split(), *named]
        outcome = train(folder, world_of(layout), *given, *more)
        assert set(outcome.codes) == {0}, outcome.text
        return outcome

    alone = tmp_path / "alone"
    run(alone, "")
    steps, wanted = trained(alone)
    assert len(steps) == 4
    for first, then in zip(layouts, (*layouts[1:], layouts[0]), strict=True):
        folder = tmp_path / f"layout_{layouts.index(first)}"
        planned = run(folder, first, "--dry-run")
        assert "\nmemory        at most, per process" in planned.text, planned.text
        for layout, more in ((first, ["train.stop_after=2"]), (then, [])):
            outcome = run(folder, layout, *more)
        assert "resumed from" in outcome.text
        found, weights = trained(folder)
        for step, like in zip(found, steps, strict=True):
            assert step["loss"] == pytest.approx(like["loss"], rel=1e-12)
            assert step["grad_norm"] == pytest.approx(like["grad_norm"], rel=1e-10)
        assert weights.keys() == wanted.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("section", "overrides"),
    [
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


MINE = """
import torch
from megapipe.layers.moe.dispatchers import AllToAllDispatcher, Dispatcher, FetchDispatcher
from megapipe.layers.moe.routers import Router, Softmax

def half(step):
    return -0.5

def first(x, weight, bias, eps):
    return x[0, 0]

class Wide(Router):
    def scores(self, logits):
        return torch.cat([logits, logits[:, :1]], 1)

class Late(Softmax):
    def choose(self, scores, top_k):
        return torch.full((len(scores), top_k), scores.shape[1])

class Bare(Router):
    pass

class Twice(Softmax):
    def choose(self, scores, top_k):
        return torch.zeros((len(scores), top_k), dtype=torch.int64)

class Given(Softmax):
    def __init__(self, t):
        self.t = t

class Part(Dispatcher):
    pass

class Fetch(FetchDispatcher):
    pass

class Broken(AllToAllDispatcher):
    @classmethod
    def settings(cls, config, mesh):
        return 1 / 0
"""
"""Code with mistakes."""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.norm=mine:half", "it is called with (x, weight, bias, eps): too many"),
        ("model.norm=mine:first", "it returns [16]"),
        ("optimizer.rule=mine:half", "it is not a class derived from"),
        (
            "model.moe.score_function=mine:half",
            "it is not a class derived from megapipe.layers.moe.rout",
        ),
        (
            "model.moe.score_function=mine:Wide",
            "scores returns [16, 5] of torch.float32: expected [16, 4]",
        ),
        ("model.moe.score_function=mine:Late", "choose returns experts 4 to 4: expected 0 to 3"),
        ("model.moe.score_function=mine:Bare", "it has no method scores"),
        ("model.moe.score_function=mine:Twice", "choose returns an expert twice for a token"),
        ("model.moe.score_function=mine:Given", "its parameter t needs a default: it gets no arg"),
        ("experts.dispatch=mine:Fetch", "it is derived from FetchDispatcher: expected Dispatcher"),
        ("experts.dispatch=mine:Broken", "ZeroDivisionError: division by zero (mine.py, line"),
        ("experts.dispatch=mine:half", "it is not a class derived from megapipe.layers.moe.disp"),
        ("experts.dispatch=mine:Part", "it has no method arrival"),
        ("optimizer.schedule=mine:half", "it returned -0.5 for step 1 of 4: expected a finite"),
    ],
)
def test_what_is_wrong_with_code_is_one_line_of_the_job(
    setting: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    key, experts = setting.partition("=")[0], ["model.moe.num_experts=4", "parallel.ep=2"]
    beside = experts if "moe" in key or key.startswith("experts") else []
    given = [setting, "parallel.dp=2", "optimizer.warmup_steps=null", *beside]
    outcome = train(tmp_path, 2, *given)
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
        longest = 20 if section in ("Router", "Dispatcher") else 10
        assert len([x for x in example(section)[1].splitlines() if x]) <= longest, section


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
    for key in re.findall(r"^\| `([\w.]+)` \| a ", PAGE, re.MULTILINE):
        attrgetter(key)(Config())


def write_rule(folder: Path) -> str:
    module, source, setting = example("Update rule")
    (folder / f"{module}.py").write_text(source)
    return setting.partition("=")[2]


def test_the_rule_of_the_example_is_adagrad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = OptimizerConfig(rule=write_rule(tmp_path), options={"eps": 1e-6}, weight_decay=0.0)
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


def test_a_callback_has_its_state_under_another_layout(tmp_path: Path) -> None:
    """A number and a tensor, to the bit, of a run that no line of megapipe knows of."""
    (source,) = re.findall(
        r"^```python\n(.*?)^```$", SECTIONS["Callback with a state"], re.M | re.S
    )
    script = tmp_path / "my_run.py"
    script.write_text(source)
    settings = {**tiny(tmp_path), "optimizer.lr": "1e-2", "train.steps": "9"}

    def told(*overrides: str) -> list[str]:
        given = [*arguments(settings), *overrides]
        done = run_forked(tmp_path, 2, *given, script=str(script))
        assert done.codes == [0, 0], done.text
        return re.findall(r"losses up to step .*", done.text)

    before, saved = told("parallel.pp=2", "train.stop_after=6")
    loaded, after = told("parallel.dp=2", "optimizer.zero=2")
    assert before == f"losses up to step 0: {[0.0] * 4}"
    assert saved == loaded
    assert saved.startswith("losses up to step 6: [")
    assert after.startswith("losses up to step 9: [")
    assert len(set(re.findall(r"\d\.\d+", saved))) == 4
