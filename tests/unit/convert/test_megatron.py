"""Megatron-LM folders as checkpoints, bit by bit, and what is refused of them."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megapipe.checkpoint.find import find_checkpoint
from megapipe.cli import parse, stored_model
from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeConfig
from megapipe.convert.commands import main
from megapipe.convert.megatron.arguments import model_of_args
from megapipe.convert.megatron.folder import MegatronFolder
from megapipe.errors import ConfigError
from tests.parity.converted import assert_same
from tests.parity.megatron_files import args_of, write_distributed, write_legacy
from tests.parity.reference import init_random
from tests.unit.model.transformers_models import model_of


def fp32(case: str, **changes: Any) -> ModelConfig:
    return model_of(case).model_copy(
        update={"dtype": "fp32", "vocab_size": 384, "layers": 5, **changes}
    )


GPT = fp32("gpt2")
LLAMA = fp32("llama_gqa")
ORDINARY = [range(2), range(2, 5)]
VIRTUAL = [range(1), range(1, 2), range(2, 2), range(2, 5)]
"""Two on each of two ranks, one without layers."""


def given(model: ModelConfig) -> dict[str, torch.Tensor]:
    return init_random(model, seed=5, dtype=torch.float32)


def read_all(folder: MegatronFolder) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model/"): folder.read(name) for name in folder.shapes()}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GPT, {}),
        (GPT, {"tp": 2, "stages": ORDINARY, "spelling": "local"}),
        (LLAMA, {"tp": 2, "stages": VIRTUAL, "chunks": 2}),
        (LLAMA, {"tp": 1, "stages": ORDINARY, "spelling": "local"}),
        (fp32("llama_mqa_wide_heads"), {"tp": 4}),
        (fp32("llama_biases_tied"), {"tp": 2, "stages": ORDINARY}),
        (fp32("qwen2"), {"tp": 4, "stages": VIRTUAL}),
        (fp32("qwen3"), {"tp": 2}),
        (fp32("mistral"), {"tp": 2, "spelling": "local"}),
    ],
    ids=lambda x: x.norm if isinstance(x, ModelConfig) else " ".join(map(str, x)),
)
def test_legacy_files_of_any_layout(
    model: ModelConfig, layout: dict[str, Any], tmp_path: Path
) -> None:
    params = given(model)
    folder = MegatronFolder.open(write_legacy(tmp_path / "there", model, params, **layout))
    assert folder.model == model
    assert_same(read_all(folder), params)


@pytest.mark.parametrize("form", ["stacked", "layers", "halves"])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_distributed_files_of_any_form(model: ModelConfig, form: Any, tmp_path: Path) -> None:
    params = given(model)
    beside = {"optimizer.state.exp_avg.embedding.word_embeddings.weight": torch.ones(3)}
    path = write_distributed(tmp_path / "there", model, params, form=form, beside=beside)
    folder = MegatronFolder.open(path)
    assert folder.model == model
    assert_same(read_all(folder), params)


def test_by_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What lies beside the weights in real files is passed over; padding is cut off."""
    params = {name: tensor.half() for name, tensor in given(LLAMA).items()}
    beside = {
        "rng_state": [{"random": random.getstate(), "numpy": np.random.get_state()}],
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "extra": BytesIO(b"x")},
        "opt_param_scheduler": {"max_lr": 1e-3},
    }
    write_legacy(
        tmp_path / "there",
        LLAMA,
        params,
        tp=2,
        stages=ORDINARY,
        beside=beside,
        exit_signal=signal.SIGTERM,
    )
    there, new = str(tmp_path / "there"), str(tmp_path / "new")
    assert main(["inspect", there]) == 0
    text = capsys.readouterr().out
    for words in (": Megatron-LM, legacy, tp 2, 2 stages\n", "fp16; 5 layers", "  kv_heads: 2\n"):
        assert words in text, text
    assert main(["inspect", there, "--config"]) == 0
    (tmp_path / "model.yaml").write_text(capsys.readouterr().out)
    half = LLAMA.model_copy(update={"dtype": "fp16"})
    assert parse([str(tmp_path / "model.yaml")]).config.model == half
    argv = ["megatron-to-megapipe", there, new, "--tokenizer", "byte", "--vocab-size", "300"]
    assert main(argv) == 0
    checkpoint = find_checkpoint(tmp_path / "new")
    assert stored_model(checkpoint.config).vocab_size == 300
    for name, tensor in params.items():
        rows = 300 if name in ("embedding.word.weight", "head.weight") else len(tensor)
        assert torch.equal(checkpoint.read(f"model/{name}"), tensor[:rows].float())


def test_which_iteration(tmp_path: Path) -> None:
    """The tracker's; without one the newest; or the one that is named."""
    params = given(GPT)
    write_legacy(tmp_path, GPT, params)
    write_distributed(tmp_path / "iter_0000200", GPT, params)
    (tmp_path / "iter_0000300").mkdir()
    assert MegatronFolder.open(tmp_path).shards.form == "legacy, tp 1, 1 stage"
    assert MegatronFolder.open(tmp_path / "iter_0000200").shards.form == "torch_dist"
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert MegatronFolder.open(tmp_path).shards.form == "torch_dist"
    (tmp_path / "iter_0000100").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert MegatronFolder.open(tmp_path).shards.form == "legacy, tp 1, 1 stage"


class Malicious:
    """An object whose unpickling makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("where", ["legacy", "oldest", "common", "index"])
def test_no_file_runs_code_without_trust(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker, params = tmp_path / "marker", given(GPT)
    if where in ("legacy", "oldest"):
        write_legacy(tmp_path / "there", GPT, params)
        path = rank_file(tmp_path / "there", "mp_rank_00")
        content = {**torch.load(path, weights_only=False), "rng_state": Malicious(marker)}
        torch.save(content, path, _use_new_zipfile_serialization=where == "legacy")  # torch 1.6 on
    else:
        folder = write_distributed(tmp_path / "there", GPT, params)
        if where == "common":
            content = {"args": args_of(GPT, evil=Malicious(marker))}
            torch.save(content, folder / "common.pt")
        else:
            index = pickle.loads((folder / ".metadata").read_bytes())
            index.planner_data = Malicious(marker)
            (folder / ".metadata").write_bytes(pickle.dumps(index))
    there = str(tmp_path / "there")
    read = ["megatron-to-megapipe", there, str(tmp_path / "new"), "--tokenizer", "byte"]
    for argv in (read, ["inspect", there]):
        assert main(argv) == 5
        (line,) = capsys.readouterr().err.splitlines()
        words = "would run posix.mkdir: pass --trust-pickle if you trust"
        assert ("needs --trust-pickle" if where == "oldest" else words) in line
        assert not marker.exists()
    assert main([*read, "--trust-pickle"]) == 0
    assert marker.is_dir()
    assert find_checkpoint(tmp_path / "new").step == 0


def rank_file(folder: Path, rank: str = "mp_rank_00_000") -> Path:
    return folder / "iter_0000100" / rank / "model_optim_rng.pt"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def in_file(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the content of rank (0, 0)'s file."""

    def prepare(folder: Path) -> None:
        content = torch.load(rank_file(folder), weights_only=False)
        change(content)
        torch.save(content, rank_file(folder))

    return prepare


def in_args(**changes: Any) -> Callable[[Path], None]:
    return in_file(lambda content: vars(content["args"]).update(changes))


def in_state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return in_file(lambda content: change(content["model"]))


def removed(*path: str) -> Callable[[Path], None]:
    return lambda folder: (folder / Path(*path)).unlink()


def unlike(folder: Path) -> None:
    """Make a norm differ between tensor-parallel ranks."""
    in_state(lambda state: state["decoder.layers.0.input_layernorm.weight"].add_(1))(folder)


def other_format(folder: Path) -> None:
    path = folder / "iter_0000100/metadata.json"
    path.write_text(json.dumps({"sharded_backend": "zarr"}))


@dataclass(frozen=True)
class Bad:
    """A mistake: what is wrong with files of tp 2 x pp 2, and what is said."""

    name: str
    code: int
    words: tuple[str, ...]
    prepare: Callable[[Path], object]
    options: str = "--tokenizer byte"


NORM = "decoder.layers.0.input_layernorm.weight"
FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
BAD = [
    Bad("empty", 5, ("is not a Megatron-LM checkpoint", "iter_"), lambda f: [
        (f / "latest_checkpointed_iteration.txt").unlink(),
        (f / "iter_0000100").rename(f / "other")]),
    Bad("tracker", 5, ("names iter_0000200, which has no checkpoint",),
        lambda f: (f / "latest_checkpointed_iteration.txt").write_text("200")),
    Bad("tracker, text", 5, ("'../x' is not an iteration",),
        lambda f: (f / "latest_checkpointed_iteration.txt").write_text("../x")),
    Bad("rank", 5, ("no model_optim_rng.pt of tensor-parallel rank 1, pipeline rank 0, of 2 x 2",),
        removed("iter_0000100", "mp_rank_01_000", "model_optim_rng.pt")),
    Bad("last rank", 5, ("files of 1 tensor-parallel ranks, args say 2",), lambda f: [
        rank_file(f, f"mp_rank_01_00{i}").parent.rename(f / f"x{i}") for i in range(2)]),
    Bad("expert ranks", 5, ("mp_rank_00_000_000 is a file of an expert-parallel",),
        lambda f: (f / "iter_0000100/mp_rank_00_000_000").mkdir()),
    Bad("truncated", 5, ("mp_rank_01_001", "is not a complete torch.save file"),
        lambda f: truncate(rank_file(f, "mp_rank_01_001"))),
    Bad("empty file", 5, ("is not a complete torch.save file",),
        lambda f: rank_file(f).write_bytes(b"")),
    Bad("text", 5, ("is not a complete torch.save",), lambda f: rank_file(f).write_text("hello")),
    Bad("list", 5, ("expected a dictionary",), lambda f: torch.save([1], rank_file(f))),
    Bad("no args", 5, ("has no args",), in_file(lambda content: content.pop("args"))),
    Bad("no model", 5, ("it has no model",), in_file(lambda content: content.pop("model"))),
    Bad("version", 5, ("checkpoint_version 2.0, expected 3",),
        in_file(lambda content: content.update(checkpoint_version=2.0))),
    Bad("older classes", 5, ("before megatron-core",),
        in_state(lambda state: state.update(language_model={}))),
    Bad("no tensors", 5, ("model is not a state dict",), in_state(lambda s: s.update({NORM: 1}))),
    Bad("virtual", 5, ("virtual stages",),
        in_file(lambda content: content.update(model0=content.pop("model")))),
    Bad("missing on a rank", 5, (NORM, "ranks 0 and 1, not on both"),
        in_state(lambda state: state.pop(NORM))),
    Bad("shape", 5, (f"{FC1} of tensor-parallel rank 0 has shape [3, 24]", "[40, 24]"),
        in_state(lambda state: state.update({FC1: torch.ones(3, 24)}))),
    Bad("types", 5, (FC1, "torch.float32, torch.int8", "F32"),
        in_state(lambda state: state.update({FC1: torch.ones(40, 24, dtype=torch.int8)}))),
    Bad("ranks differ", 5, (NORM, "differs between tensor-parallel ranks"), unlike),
    Bad("layers", 5, ("layers.5.input_layernorm.weight is missing",), in_args(num_layers=6)),
    Bad("too few", 5, ("decoder.layers.4", "not part of the model"), in_args(num_layers=4)),
    Bad("argument", 2, ("lack ffn_hidden_size",), in_args(ffn_hidden_size=None)),
    Bad("experts", 2, ("num_experts = 8", "expected None"), in_args(num_experts=8)),
    Bad("latent attention", 2, ("multi_latent_attention = True",),
        in_args(multi_latent_attention=True)),
    Bad("positions", 2, ("position_embedding_type = 'mrope'", "learned_absolute or rope"),
        in_args(position_embedding_type="mrope")),
    Bad("no number", 2, ("the arguments give model.hidden = 'wide'",), in_args(hidden_size="wide",
        kv_channels=6)),
    Bad("vocabulary", 2, ("--vocab-size 385: expected 2 to 384",), lambda f: None,
        "--tokenizer byte --vocab-size 385"),
    Bad("tokenizer's ids", 2, ("has 257 ids", "has 256"), lambda f: None,
        "--tokenizer byte --vocab-size 256"),
    Bad("no tokenizer", 3, ("has no tokenizer", "--tokenizer"), lambda f: None, ""),
    Bad("another format", 5, ("sharded_backend is 'zarr'; only torch_dist",), other_format),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_input_is_one_line_with_a_code(
    bad: Bad, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    write_legacy(there, LLAMA, given(LLAMA), tp=2, stages=ORDINARY, spelling="local")
    bad.prepare(there)
    argv = ["megatron-to-megapipe", str(there), str(tmp_path / "new"), *bad.options.split()]
    assert main(argv) == bad.code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megapipe: error: ")
    for word in bad.words:
        assert word in line, line
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "nothing is left behind"


DAMAGED = [
    ("index", 5, (".metadata", "is not a complete DCP index"), lambda f: truncate(f / ".metadata")),
    ("no index", 5, ("cannot read", ".metadata: No such file"), removed(".metadata")),
    ("common", 5, ("cannot read", "common.pt: No such file"), removed("common.pt")),
    ("tensors", 5, ("__0_0.distcp: tensor ", "zip archive"), lambda f: [
        path.write_bytes(path.read_bytes()[:4000]) for path in f.glob("*.distcp")]),
    ("no tensors", 5, ("No such file",), removed("__0_0.distcp")),
    ("no args", 5, ("common.pt has no args",), lambda f: torch.save({}, f / "common.pt")),
    ("not all", 5, ("pieces of tensor", "do not cover its shape [384, 24]"), lambda f: in_index(
        f, lambda x: x.state_dict_metadata["embedding.word_embeddings.weight"].chunks.clear())),
    ("escaping", 5, ("'../x'", "is not a file of the folder"), lambda f: in_index(
        f, lambda x: [setattr(at, "relative_path", "../x") for at in x.storage_data.values()])),
    ("another index", 5, ("is not a DCP index",),
        lambda f: (f / ".metadata").write_bytes(pickle.dumps({}))),
]  # fmt: skip


def in_index(folder: Path, change: Callable[[Any], object]) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


@pytest.mark.parametrize(("code", "words", "prepare"), [x[1:] for x in DAMAGED],
                         ids=[x[0] for x in DAMAGED])  # fmt: skip
def test_damage_to_distributed_files(
    code: int,
    words: tuple[str, ...],
    prepare: Callable[[Path], object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = write_distributed(tmp_path / "there", GPT, given(GPT))
    prepare(there)
    argv = ["megatron-to-megapipe", str(there), str(tmp_path / "new"), "--tokenizer", "byte"]
    assert main(argv) == code
    (line,) = capsys.readouterr().err.splitlines()
    for word in words:
        assert word in line, line
    assert not (tmp_path / "new").exists()


ARGUMENTS: list[tuple[dict[str, Any], dict[str, Any] | str]] = [
    ({"swiglu": False}, {"activation": "gelu"}),
    ({"use_rope_scaling": True, "rope_scaling_factor": 32.0},
     {"rope": RopeConfig(base=500.0, scaling="llama3", factor=32.0, original_positions=8192,
                         low_freq_factor=1.0, high_freq_factor=4.0)}),
    ({"rotary_seq_len_interpolation_factor": 4},
     {"rope": RopeConfig(base=500.0, scaling="linear", factor=4)}),
    ({"rotary_percent": 0.5}, {"rope": RopeConfig(base=500.0, percent=0.5)}),
    ({"apply_layernorm_1p": True}, {"zero_centered_norm": True}),
    ({"window_size": (7, 0), "window_attn_skip_freq": 2},
     {"sliding_window": 8, "full_attention_every": 2}),
    ({"window_size": (7, 0), "window_attn_skip_freq": [1, 0, 1, 0, 1]},
     {"sliding_window": 8, "full_attention_every": 2}),
    ({"window_size": (7, 0), "window_attn_skip_freq": [1] * 5}, {"sliding_window": 8}),
    ({"window_size": (-1, 0)}, {}),
    ({"softmax_scale": 0.25}, {"attention_scale": 0.25}),
    ({"normalization": None, "add_bias_linear": True}, {"norm": "layernorm", "bias": True}),
    ({"use_rotary_position_embeddings": True, "position_embedding_type": "learned_absolute"}, {}),
    ({"normalization": "LayerNorm"}, "add_bias_linear = False"),
    ({"normalization": "LayerNorm", "add_bias_linear": True, "qk_layernorm": True},
     "qk_layernorm = True"),
    ({"normalization": "L2Norm"}, "normalization = 'L2Norm'"),
    ({"window_size": (7, 1)}, "window_size = (7, 1)"),
    ({"window_size": (7, 0), "window_attn_skip_freq": [0, 0, 1, 0, 1]}, "window_attn_skip_freq"),
    ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 4}, "interpolation_factor"),
    ({"softmax_type": "learnable"}, "softmax_type = 'learnable'"),
    ({"num_attention_heads": 0}, "model.heads = 0"),
    ({"window_size": 7}, "the arguments do not describe a model"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "outcome"), ARGUMENTS, ids=lambda x: str(x)[:40])
def test_arguments(changes: dict[str, Any], outcome: dict[str, Any] | str) -> None:
    args = vars(Namespace(**{**vars(args_of(LLAMA)), **changes}))
    if isinstance(outcome, str):
        with pytest.raises(ConfigError) as raised:
            model_of_args(args)
        assert outcome in str(raised.value)
    else:
        assert model_of_args(args) == LLAMA.model_copy(update=outcome)
