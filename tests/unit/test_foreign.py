"""Files and flags of other trainers are answered with the page that maps them."""

from pathlib import Path

import pytest

from megapipe import foreign, presets
from megapipe.cli import parse
from megapipe.errors import ConfigError
from megapipe.keys import KEYS

ROOT = Path(__file__).resolve().parents[2]
TITAN = '[job]\ndump_folder = "./outputs"\n\n[training]\nsteps = 10\n[model]\nname = "llama3"\n'
NANOTRON = "general:\n  run: x\ntokens:\n  train_steps: 3\ndata_stages:\n- name: a\n  start: 1\n"
DEEPSPEED = '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("titan.toml", TITAN, "of torchtitan, whose keys are others: docs/from_others.md"),
        ("tiny.yaml", NANOTRON, "of nanotron, whose keys are others: docs/from_others.md"),
        ("ds_config.json", DEEPSPEED, "of DeepSpeed, whose keys are others: docs/from_deepspeed"),
    ],
)
def test_a_file_of_another_trainer(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse([str(tmp_path / name), "train.steps=3"])
    assert f"{tmp_path / name}: a configuration {words}" in str(caught.value)


@pytest.mark.parametrize("flag", ["--num-layers", "--tensor-model-parallel-size=2", "--swiglu"])
def test_a_flag_of_megatron(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"a flag of Megatron-LM: docs/from_megatron.md maps"):
        parse([flag, "24"])


def test_every_flag_is_on_its_page() -> None:
    page = (ROOT / "docs/from_megatron.md").read_text(encoding="utf-8")
    assert [flag for flag in sorted(foreign.MEGATRON.marks) if f"--{flag}" not in page] == []


def test_our_own_files_are_not_mistaken() -> None:
    own = {key.partition(".")[0] for key in KEYS}
    for trainer in (foreign.TORCHTITAN, foreign.NANOTRON, foreign.DEEPSPEED):
        assert not trainer.marks & own
        assert (ROOT / trainer.page).is_file()
    for name in presets.names():
        assert foreign.trainer_of(presets.find(name).read_text(encoding="utf-8")) is None
    for text in ("", "[1, 2]", "null", "{", "model:\n  general: 1\n  tokens: 2\n"):
        assert foreign.trainer_of(text) is None
