"""The commands of scripts/convert.py, and bad input of each: one line, a documented code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from megapipe.checkpoint.find import find_checkpoint
from megapipe.cli import parse
from megapipe.convert import HuggingFaceFolder, export
from megapipe.convert.commands import main
from megapipe.errors import DataError
from megapipe.model import hub
from tests.parity.both_ways import MODEL, change_json, write_both_ways
from tests.parity.converted import assert_same, state_of, write_checkpoint
from tests.parity.reference import init_random
from tests.unit.data.data_cases import train_bpe
from tests.unit.model.transformers_models import model_of


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_both_ways(tmp_path)


def in_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "hf/config.json", **changes)


def in_weights(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Prepare a folder with one file of changed tensors."""

    def prepare(folder: Path) -> None:
        state = state_of(folder / "hf")
        for path in (folder / "hf").glob("model*"):
            path.unlink()
        change(state)
        save_file(state, folder / "hf/model.safetensors")

    return prepare


def shard(folder: Path) -> Path:
    return folder / "hf/model-00002-of-00002.safetensors"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def damage(folder: Path) -> None:
    """Change a byte of the run's weights."""
    (path,) = (folder / "run").rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def pickled(folder: Path) -> None:
    for path in (folder / "hf").glob("model*"):
        path.unlink()
    (folder / "hf/pytorch_model.bin").write_bytes(b"x")


def escaping(folder: Path) -> None:
    path = folder / "hf/model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    change_json(path, weight_map=dict.fromkeys(index, "../other.safetensors"))


def renamed(folder: Path) -> None:
    path = folder / "hf/model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    index["lm_head.weigh"] = index.pop("lm_head.weight")
    change_json(path, weight_map=index)


def without_tokenizer(folder: Path) -> None:
    for path in (folder / "hf").glob("tokenizer*"):
        path.unlink()


def other_tokenizer(tokenizer: Tokenizer) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        without_tokenizer(folder)
        tokenizer.save(str(folder / "hf/tokenizer.json"))

    return prepare


def other_run(**changes: Any) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        model = MODEL.model_copy(update=changes)
        write_checkpoint(folder / "other", model, init_random(MODEL, 5, dtype=torch.float32))

    return prepare


@dataclass(frozen=True)
class Bad:
    """A mistake: what is wrong, with which command it is found, and what is said."""

    name: str
    code: int
    words: tuple[str, ...]
    argv: str
    prepare: Callable[[Path], object] = lambda folder: None


READ, WRITE = "hf-to-megapipe hf new", "megapipe-to-hf run new"
BAD = [
    Bad("no command", 2, ("required: COMMAND", "--help"), ""),
    Bad("command", 2, ("invalid choice: 'export'",), "export run new"),
    Bad("no folder", 5, ("gone: no such folder", "a name on the hub"), "hf-to-megapipe ./gone new"),
    Bad("a file", 5, ("hf/config.json: no such folder",), "inspect hf/config.json"),
    Bad("neither", 5, ("neither a checkpoint nor a run folder",), "inspect ."),
    Bad("no config", 5, ("cannot read run/config.json",), "hf-to-megapipe run new"),
    Bad("json", 5, ("config.json is not JSON",), READ, lambda f: truncate(f / "hf/config.json")),
    Bad("family", 2, ("model_type 'opt' is not", "gpt2, llama"), READ, in_config(model_type="opt")),
    Bad("family, inspected", 2, ("'opt' is not",), "inspect hf", in_config(model_type="opt")),
    Bad("no family", 2, ("model_type None",), READ, in_config(model_type=None)),
    Bad("value", 2, ("config.json", "hidden_act 'relu'", "silu"), READ,
        in_config(hidden_act="relu")),
    Bad("rope", 2, ("rope_type 'longrope'",), READ,
        in_config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4,
                                   "short_factor": [1.0] * 3, "long_factor": [1.0] * 3})),
    Bad("a share that the class ignores", 2, ("config.json", "partial_rotary_factor = 0.5"), READ,
        in_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                   "partial_rotary_factor": 0.5})),
    Bad("quantized", 2, ("quantization_config (gptq)", "not read"), READ,
        in_config(quantization_config={"quant_method": "gptq", "bits": 4})),
    Bad("quantized by nothing", 2, ("quantization_config ({}): m", "without this key"), READ,
        in_config(quantization_config={})),
    Bad("quantized somehow", 2, ('quantization_config ({"bits": 4}): megapipe does not',), READ,
        in_config(quantization_config={"bits": 4})),
    Bad("dropout", 2, ("attention_dropout = 0.1", "must be 0"), READ,
        in_config(attention_dropout=0.1)),
    Bad("type", 2, ("config.json: ", "hidden_size"), READ, in_config(hidden_size="wide")),
    Bad("no heads", 2, ("config.json",), READ, in_config(num_attention_heads=0)),
    Bad("layers", 2, ("model.layers = 100000",), READ, in_config(num_hidden_layers=100000)),
    Bad("shard", 5, ("hf: the shard model-00002-of-00002", "is missing"), READ,
        lambda f: shard(f).unlink()),
    Bad("truncated", 5, ("model-00002-of-00002", "is not a complete"), READ,
        lambda f: truncate(shard(f))),
    Bad("pickled", 5, ("neither model.safetensors nor", "pytorch_model.bin is pickled"), READ,
        pickled),
    Bad("escaping", 5, ("'../other.safetensors'", "is not a file name"), READ, escaping),
    Bad("index", 5, ("lm_head.weigh", "not in"), READ, renamed),
    Bad("missing tensor", 5, ("model.norm.weight is missing", "[24]"), READ,
        in_weights(lambda state: state.pop("model.norm.weight"))),
    Bad("extra tensor", 5, ("model.score.weight is not part", "(1 such"), READ,
        in_weights(lambda state: state.update({"score.weight": torch.ones(2)}))),
    Bad("shape", 5, ("lm_head.weight has shape [3, 24]", "[257, 24]"), READ,
        in_weights(lambda state: state.update({"lm_head.weight": torch.ones(3, 24)}))),
    Bad("number type", 5, ("model.norm.weight is I8", "BF16, F16, F32, F64"), READ,
        in_weights(lambda state: state.update({"model.norm.weight": torch.ones(24).char()}))),
    Bad("no tokenizer", 3, ("hf has no tokenizer", "--tokenizer"), READ, without_tokenizer),
    Bad("no eos", 3, ("no end-of-document token",), READ,
        other_tokenizer(train_bpe(["<unk>"], 256))),
    Bad("many ids", 2, ("has 320 ids", "has 257"), READ, other_tokenizer(train_bpe(["</s>"], 320))),
    Bad("tokenizer", 3, ("./gone", "no such file"), f"{READ} --tokenizer ./gone"),
    Bad("output", 5, ("run exists already",), "hf-to-megapipe hf run"),
    Bad("output in a file", 5, ("cannot write", "Not a directory"), f"{READ}/x",
        lambda f: (f / "new").write_text("")),
    Bad("output, export", 5, ("hf exists already",), "megapipe-to-hf run hf"),
    Bad("shard size", 2, ("--shard-gb 0.0", "> 0"), f"{READ} --shard-gb 0"),
    Bad("shard size, nan", 2, ("--shard-gb nan",), f"{WRITE} --shard-gb nan"),
    Bad("shard size, text", 2, ("--shard-gb", "'big'"), f"{WRITE} --shard-gb big"),
    Bad("dtype", 2, ("'int8'", "bf16"), f"{WRITE} --dtype int8"),
    Bad("class", 2, ("'opt'", "llama"), f"{WRITE} --model-type opt"),
    Bad("other class", 2, ("model.norm = rmsnorm", "gpt2"), f"{WRITE} --model-type gpt2"),
    Bad("no checkpoint", 5, ("hf is neither a checkpoint",), "megapipe-to-hf hf new"),
    Bad("damaged", 5, ("damaged", "checksum"), WRITE, damage),
    Bad("no class", 2, ("model.dropout = 0.3 cannot be expressed", "needs 0.0"),
        "megapipe-to-hf other new", other_run(dropout=0.3)),
    Bad("own model", 2, ("model.source=mine:layers",), "megapipe-to-hf other new",
        other_run(source="mine:layers")),
    Bad("entries", 5, ("unexpected entry", "layers.1."), "megapipe-to-hf other new",
        other_run(layers=1)),
    Bad("tokenizer, export", 3, ("./gone", "no such file"), f"{WRITE} --tokenizer ./gone"),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_input_is_one_line_with_a_code(
    bad: Bad, given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad.prepare(given)
    before = sorted(given.iterdir())
    assert main(bad.argv.split()) == bad.code
    (line,) = (x for x in capsys.readouterr().err.splitlines() if "exceeds" not in x)
    assert line.startswith("megapipe: error: ")
    for word in bad.words:
        assert word in line, line
    assert sorted(given.iterdir()) == before, "nothing is left behind"


def test_both_ways_by_commands(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hf-to-megapipe", "hf", "deep/back"]) == 0
    assert main(["megapipe-to-hf", "deep/back", "again", "--shard-gb", "0.00005"]) == 0
    assert_same(state_of(given / "again"), state_of(given / "hf"))
    names = {path.name for path in (given / "hf").iterdir()}
    assert {path.name for path in (given / "again").iterdir()} == names
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        assert (given / "again" / name).read_text() == (given / "hf" / name).read_text(), name
    captured = capsys.readouterr()
    assert "megapipe: model-00002-of-00002.safetensors: " in captured.err
    assert captured.out.splitlines()[-1].startswith("again: step 0 of deep/back/checkpoints/step-")
    # a sampling of its own goes with the tokenizer
    change_json(given / "hf/generation_config.json", temperature=0.25, do_sample=True)
    assert main(["hf-to-megapipe", "hf", "sampled"]) == 0
    assert main(["megapipe-to-hf", "sampled", "out"]) == 0
    assert json.loads((given / "out/generation_config.json").read_text())["temperature"] == 0.25


def test_of_two_kinds_of_files_those_are_read_that_transformers_reads(
    given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line says so."""
    hf = AutoModelForCausalLM.from_pretrained(given / "hf")
    index = (given / "hf/model.safetensors.index.json").read_text()
    for path in (given / "hf").glob("model*"):
        path.unlink()
    with torch.no_grad():
        hf.lm_head.weight.fill_(0.5)
    hf.save_pretrained(given / "hf")
    assert main(["inspect", "hf"]) == 0
    assert "is read" not in capsys.readouterr().out
    (given / "hf/model.safetensors.index.json").write_text(index)
    told = "hf/model.safetensors is read, as transformers does, and model.safetensors.index.json"
    assert main(["inspect", "hf"]) == 0
    assert told in capsys.readouterr().out
    assert main(["hf-to-megapipe", "hf", "new", "--tokenizer", "byte"]) == 0
    assert told in capsys.readouterr().err
    read = find_checkpoint(given / "new").read("model/head.weight")
    assert torch.equal(read, torch.full_like(read, 0.5))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(given / "hf").lm_head.weight, read)


def test_what_inspect_shows(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "hf"]) == 0
    text = capsys.readouterr().out
    for words in (
        "hf: llama (LlamaForCausalLM)\n",
        "21 tensors of 21,672 values, F32, 0.000 GB in 2 files\n",
        "21,672 parameters, fp32; 2 layers, hidden 24, 19 positions, vocabulary 257, ",
        ", embeddings not tied\n",
        "  kv_heads: 2\n",
    ):
        assert words in text, text
    assert main(["inspect", "run"]) == 0
    text = capsys.readouterr().out
    assert "checkpoint of step 3 by" in text
    assert "of weights in fp32; no optimizer state; " in text
    assert "Hugging Face classes that express it: llama" in text
    for name in ("hf", "run"):
        assert main(["inspect", name, "--config"]) == 0
        path = given / "model.yaml"
        path.write_text(capsys.readouterr().out)
        assert parse([str(path)]).config.model == MODEL
    other_run(dropout=0.3)(given)
    assert main(["inspect", "other"]) == 0
    assert "no Hugging Face class expresses it: model.dropout = 0.3" in capsys.readouterr().out
    in_config(model_type="opt")(given)
    assert main(["inspect", "hf"]) == 2
    assert "21 tensors of 21,672 values" in capsys.readouterr().out


@pytest.mark.parametrize("balance", [0.01, 0.05])
def test_a_balance_of_experts_that_is_no_default_is_told(
    balance: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line tells it, also above the configuration that has it."""
    model = model_of("mixtral")
    model = model.model_copy(
        update={"moe": model.moe.model_copy(update={"aux_loss_coeff": balance})}
    )
    checkpoint = write_checkpoint(tmp_path / "run", model, init_random(model, seed=5))
    export(checkpoint, tmp_path / "hf", tokenizer="none")
    folder = str(tmp_path / "hf")
    line = (
        "the config.json says that the model is trained with model.moe.aux_loss_coeff=0.05: a "
        "run that does not set it uses 0.01\n"
    )
    for argv, told in (([folder], line), ([folder, "--config"], f"# {line}")):
        capsys.readouterr()
        assert main(["inspect", *argv]) == 0
        assert (told in capsys.readouterr().out) == (balance == 0.05)


def test_a_name_on_the_hub(
    given: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hub is stood in for: a copy that has the tokenizer alone is not enough."""
    import huggingface_hub

    asked = []

    def snapshot(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append((name, local_files_only))
        if local_files_only and len(asked) > 1:
            raise OSError("not there")
        return str(given / ("run" if local_files_only else "hf"))

    def unreachable(what: str, name: str, kind: str) -> None:
        raise DataError(
            f"{what} {name!r}: it cannot be downloaded from the Hugging Face hub (offline)"
        )

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(hub, "check_reachable", lambda *names: None)
    assert main(["hf-to-megapipe", "owner/name", "new"]) == 0
    assert asked == [("owner/name", True), ("owner/name", False)]
    assert find_checkpoint(given / "new").step == 0
    capsys.readouterr()
    monkeypatch.setattr(hub, "check_reachable", unreachable)
    assert main(["inspect", "owner/name"]) == 5
    assert "it cannot be downloaded from the Hugging Face hub" in capsys.readouterr().err


def test_a_folder_is_there_whole_or_not_at_all(
    given: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interruption in the middle of the weights leaves nothing."""
    reads = []
    read = HuggingFaceFolder.read

    def interrupted(self: HuggingFaceFolder, name: str, *more: Any) -> torch.Tensor:
        reads.append(name)
        if len(reads) == 5:
            raise KeyboardInterrupt
        return read(self, name, *more)

    monkeypatch.setattr(HuggingFaceFolder, "read", interrupted)
    before = sorted(given.iterdir())
    assert main(["hf-to-megapipe", "hf", "new"]) == 130
    assert sorted(given.iterdir()) == before
