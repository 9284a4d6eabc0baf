"""Files and flags of other trainers are answered with the page that maps them."""

import re
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.config.foreign import describe_file
from megapipe.config.keys import KEYS, MAPPINGS, OPTION_KEYS
from megapipe.config.megatron_flags import FLAGS
from megapipe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
TITAN = "of torchtitan, whose keys are others: docs/from_others.md maps them"
NANOTRON = "of nanotron, whose keys are others: docs/from_others.md maps them"
DEEPSPEED = "of DeepSpeed, whose keys are others: docs/from_deepspeed.md maps them"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.toml", '[job]\ndump_folder = "."\n\n[training]\nsteps = 10\n', TITAN),
        ("x.toml", '[model]\nname = "llama3"\nflavor = "8B"\n', TITAN),
        ("x.yaml", '[job]\ndump_folder = "."\n', TITAN),
        ("x.yaml", "general:\n  run: x\ntokens:\n  train_steps: 3\n", NANOTRON),
        ("x.yaml", "model:\n  model_config:\n    hidden_size: 16\n  dtype: bfloat16\n", NANOTRON),
        ("x.yaml", "data_stages:\n- data: &a {x: 1}\n  y: *a\n", NANOTRON),
        ("x.json", '{"train_batch_size": 8, "bf16": {"enabled": true}}', DEEPSPEED),
        ("x.json", '{"train_batch_size": "auto"}', DEEPSPEED),
        ("x.json", '{"fp16": {"enabled": "auto"}}', DEEPSPEED),
        ("x.json", '{"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}', DEEPSPEED),
        ("x.json", '{\n\t"zero_optimization": {\n\t\t"stage": 2\n\t}\n}', DEEPSPEED),
    ],
)
def test_a_file_of_another_trainer(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse([str(tmp_path / name), "train.steps=3"])
    assert str(caught.value) == f"{tmp_path / name}: a configuration {words}"


@pytest.mark.parametrize("text", ["[optimizer]\nlr = 3e-4\n", "[optimizer\n", "lr = 3e-4"])
def test_toml_of_nobody_in_particular(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.toml: TOML, where a configuration is YAML; docs"):
        parse([str(tmp_path / "x.toml")])


def test_an_empty_toml_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="has no keys"):
        parse([str(tmp_path / "x.toml")])


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--num-layers", "of Megatron-LM (here model.layers): docs/from_megatron.md maps"),
        ("--tensor-model-parallel-size=2", "(here parallel.tp): docs/from_megatron.md"),
        ("--micro_batch_size", "(here train.microbatch): docs/from_megatron.md"),
        ("--bf16", "of Megatron-LM (here model.dtype=bf16): docs/from_megatron.md maps them"),
        ("--lr", "(here optimizer.lr): docs/from_megatron.md"),
        ("--seed", "(here run.seed): docs/from_megatron.md"),
        ("--hysteresis", "a flag of Megatron-LM: docs/from_megatron.md maps them"),
        ("--num-experts", "(here model.moe.num_experts): docs/moe.md maps them"),
        ("--deepspeed_config", "a flag of DeepSpeed: docs/from_deepspeed.md maps"),
        ("--training.steps", "a flag of torchtitan: docs/from_others.md maps them"),
    ],
)
def test_a_flag_of_another_trainer(flag: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse([flag, "24"])


OUR_FLAGS = {"append-eod", "config", "latency-us", "output", "restarts"}
"""In the tables too, or of a tool of theirs."""


def test_the_flags_are_those_of_the_pages() -> None:
    pages = [ROOT / "docs" / name for name in ("from_megatron.md", "moe.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {*re.findall(r"--([a-z][a-z0-9-]*)", "\n".join(rows))} <= {*FLAGS} | OUR_FLAGS
    for flag, key in FLAGS.items():
        assert re.search(rf"--{flag}\b", text), flag
        name = key.partition("=")[0]
        if name:
            assert name in {*KEYS, *OPTION_KEYS} or name in MAPPINGS, flag
            with_flag = "".join(row for row in rows if f"--{flag}" in row)
            assert name.rpartition(".")[2] in with_flag, flag


def test_our_own_mistakes_are_not_anothers(tmp_path: Path) -> None:
    for text in ("", "[1, 2]", "null", "{", "model:\n  general: 1\n  tokens: 2\n", "? [a]\n: 1\n"):
        assert describe_file(text, ".yaml") is None
    for text in ("parallelism:\n  pp: 2\n", "optimizer:\n  type: adam\n", "bf16: true\n"):
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(ConfigError, match="unknown key"):
            parse([str(tmp_path / "x.yaml")])
