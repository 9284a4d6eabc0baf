import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from megapipe import cli
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve
from megapipe.observe.summary import format_summary, next_commands, read_summary
from tests.parity.summary import SUMMARY


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    return tmp_path


def test_the_summary_says_how_it_went(run_folder):
    assert format_summary(read_summary(run_folder)).splitlines() == [
        "trained     300 steps in 2:22, 57,612 tokens/s",
        "loss        from 5.5512 to 1.9021 nats per token",
        "validation  1.9500, 0.60 x the corpus' unigram entropy of 3.2500",
        "run folder  runs/quickstart-1",
    ]


def test_an_entropy_that_is_not_known_is_not_compared_with(run_folder):
    (run_folder / "summary.json").write_text(json.dumps({**SUMMARY, "unigram_entropy": None}))
    lines = format_summary(read_summary(run_folder)).splitlines()
    assert lines[2] == "validation  1.9500, the corpus' unigram entropy is not known"


def test_it_ends_with_the_commands_that_go_on_from_the_run(run_folder, monkeypatch):
    """They name this Python, this folder and as many processes as the recorded layout has."""
    monkeypatch.chdir(run_folder.parent)
    given = ["parallel.dp=2", "parallel.tp=2", "pipeline.transport=in_process", "parallel.pp=2"]
    config, _ = resolve(cli.parse([*given, "train.steps=30"]).config, None, None)
    (run_folder / "config.yaml").write_text(cli.dump(config))
    place = Path("a b")
    run_folder.rename(place)
    text, train, export = list(next_commands(place).values())
    python = shlex.quote(sys.executable)
    assert text == f"{python} -m megapipe generate 'a b' --prompt 'def '"
    assert export == f"{python} -m megapipe convert megapipe-to-hf 'a b' 'a b-hf'"
    assert train == (
        f"{python} -m megapipe launch --nproc 4 -m megapipe train 'a b/config.yaml' train.steps=60"
    )
    given = ("--nproc", "4", "--max-restarts", "3")
    assert next_commands(place, 30, given)["to continue"] == (
        f"{python} -m megapipe launch --nproc 4 --max-restarts 3 -m megapipe train "
        "'a b/config.yaml' train.steps=60"
    )
    monkeypatch.setattr(sys, "executable", str(Path.cwd() / ".venv/bin/python"))
    assert all(c.startswith(".venv/bin/python -m ") for c in next_commands(place).values())
    assert cli.parse([str(place / "config.yaml"), "train.steps=60"]).config.train.steps == 60


def test_a_model_of_no_class_has_no_command_for_its_export(run_folder):
    given = ["model.positions=alibi", "model.norm=rmsnorm"]
    (run_folder / "config.yaml").write_text(cli.dump(cli.parse(given).config))
    assert list(next_commands(run_folder)) == ["to generate", "to continue"]


@pytest.mark.parametrize(
    ("reached", "stop", "further"),
    [
        (None, None, ["train.steps=60"]),
        (30, None, ["train.steps=60"]),
        (12, None, []),
        (12, 12, ["train.stop_after=null"]),
        (12, 20, []),
        (30, 30, ["train.steps=60", "train.stop_after=null"]),
    ],
)
def test_it_goes_on_from_the_last_start_and_its_newest_checkpoint(tmp_path, reached, stop, further):
    """The last start is the one written last, which may have gone back to an earlier step."""
    names = ["config.yaml", "config-step-00000010.yaml", "config-step-00000004.yaml"]
    for age, name in enumerate(reversed(names)):
        last = name == names[-1]
        keys = ["train.steps=30", f"train.stop_after={json.dumps(stop)}"] if last else []
        (tmp_path / name).write_text(cli.dump(cli.parse(["model.vocab_size=257", *keys]).config))
        os.utime(tmp_path / name, ns=(0, 10**18 - age))
    if reached is not None:
        for step in (2, reached):
            (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    words = shlex.split(next_commands(tmp_path)["to continue"])
    assert words[words.index("train") + 1 :] == [str(tmp_path / names[-1]), *further]
    stopped = shlex.split(next_commands(tmp_path, 11)["to continue"])
    assert stopped[-1] == str(tmp_path / names[-1]), "wherever its checkpoints are"


@pytest.mark.parametrize(
    ("text", "where"),
    [("{", "file: "), ("{}", "loss_first: "), (json.dumps({**SUMMARY, "steps": "x"}), "steps: ")],
)
def test_a_damaged_summary_names_the_field(tmp_path, text, where):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ConfigError, match=f"summary.json: {where}"):
        read_summary(tmp_path)
