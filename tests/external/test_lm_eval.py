"""lm-evaluation-harness gets equal results from megapipe's adapter and from its own transformers
class. Runs if lm_eval is installed; its tasks are local."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval.models.huggingface")

from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from megapipe.convert import export
from megapipe.evaluate.commands import main
from megapipe.evaluate.harness import HarnessModel
from megapipe.inference import load_model
from tests.parity.converted import write_checkpoint
from tests.parity.reference import init_random
from tests.unit.model.transformers_models import model_of

pytestmark = pytest.mark.full

CONTEXT = 48
QUESTIONS = [
    {
        "question": f"{a} and {b} are",
        "choices": [str(a + b), f"about {a * b}", "é"],
        "answer": a % 3,
    }
    for a in range(4)
    for b in range(5)
]
TEXTS = ["Some words of a text. " * 9, "short", "and é, which is two bytes"]
CHOICES = """
task: local_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
"""
ROLLING = """
task: local_texts
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run, its export, and tasks with their data."""
    path = tmp_path_factory.mktemp("lm_eval")
    model = model_of("llama_gqa").model_copy(
        update={"vocab_size": 257, "max_positions": CONTEXT, "dtype": "fp32"}
    )
    params = init_random(model, seed=6, dtype=torch.float32)
    export(write_checkpoint(path / "run", model, params), path / "hf")
    (path / "tasks").mkdir()
    for name, text, rows in (
        ("choices", CHOICES, QUESTIONS),
        ("texts", ROLLING, [{"text": text} for text in TEXTS]),
    ):
        data = path / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (path / f"tasks/{name}.yaml").write_text(text.replace("FILE", str(data)))
    return path


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[HarnessModel, Any]:
    """Return megapipe's adapter with the run, and the harness' own class with the export."""
    from megapipe.checkpoint.find import find_checkpoint

    ours = HarnessModel(load_model(find_checkpoint(folder / "run"), torch.device("cpu")), batch=3)
    theirs = HFLM(
        pretrained=str(folder / "hf"),
        device="cpu",
        dtype="float32",
        batch_size=2,
        max_length=CONTEXT,
    )
    return ours, theirs


def evaluated(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    found = simple_evaluate(
        model=model, tasks=["local_choices", "local_texts"], task_manager=manager
    )
    assert found is not None
    return found


def test_both_give_the_same_results(
    folder: Path,
    models: tuple[HarnessModel, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Accuracies are equal, and so is each log-likelihood, to 1e-4."""
    ours, theirs = (evaluated(model, folder, monkeypatch) for model in models)
    for metric in ("acc", "acc_norm", "acc_bytes"):
        one, other = (
            found["results"]["local_choices"][f"{metric},none"] for found in (ours, theirs)
        )
        assert one == other
        assert 0 < one < 1
    for metric in ("byte_perplexity", "bits_per_byte"):
        one, other = (found["results"]["local_texts"][f"{metric},none"] for found in (ours, theirs))
        assert one == pytest.approx(other, rel=1e-5)
    likelihoods = [
        [
            float(value)
            for sample in found["samples"]["local_choices"]
            for ((value, _),) in sample["resps"]
        ]
        for found in (ours, theirs)
    ]
    assert len(likelihoods[0]) == 3 * len(QUESTIONS)
    assert likelihoods[0] == pytest.approx(likelihoods[1], abs=1e-4)

    local = functools.partial(TaskManager, include_defaults=False)  # there are thousands of others
    monkeypatch.setattr("lm_eval.tasks.TaskManager", local)
    capsys.readouterr()
    given = ["harness", str(folder / "run"), "--tasks", "local_choices"]
    assert main([*given, "--include-path", str(folder / "tasks"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["local_choices"]["acc,none"] == ours["results"]["local_choices"]["acc,none"]
    assert main([*given[:-1], "no_such_task"]) == 2
    assert "has no such task" in capsys.readouterr().err


def test_both_write_the_same_texts(models: tuple[HarnessModel, Any]) -> None:
    settings = (
        {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        {"until": [], "max_gen_toks": 5},
    )
    requests = [
        Instance("generate_until", {}, (text, dict(given)), i)
        for i, text in enumerate(("ab", "a longer text", "x"))
        for given in settings
    ]
    ours, theirs = (model.generate_until(requests) for model in models)
    assert ours == theirs
