"""Checkpoints and Hugging Face folders, both ways, bit by bit; logits as transformers has."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from megapipe.checkpoint import Region, find_newest, whole
from megapipe.checkpoint.find import find_checkpoint
from megapipe.checkpoint.reader import Checkpoint
from megapipe.cli import parse, stored_model
from megapipe.config.model import ModelConfig
from megapipe.convert import HuggingFaceFolder, export, import_model
from megapipe.convert.describe import as_configuration
from megapipe.errors import CheckpointError, ConfigError
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.specs import by_name
from megapipe.model.gpt.hf.config import class_of, config_to_hf, row_of
from megapipe.model.gpt.hf.table import TABLE
from megapipe.model.gpt.hf.weights import to_hf
from megapipe.model.gpt.parameters import stage_parameters
from megapipe.model.partition import StageSpec
from megapipe.model.tensor_files import TensorFiles
from tests.parity.converted import assert_same, state_of, write_checkpoint
from tests.parity.reference import init_random, random_batch
from tests.parity.stage_cases import new_stage
from tests.parity.tiers import in_parts
from tests.unit.model.transformers_models import CASES, FAMILIES, MIXTURES, model_of

ALL = [*CASES, *FAMILIES, *MIXTURES]
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def fp32(case: str) -> ModelConfig:
    """Return a model with more tokens than the byte tokenizer, whose number is padded in runs."""
    return model_of(case).model_copy(update={"dtype": "fp32", "vocab_size": 259})


def tensors_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("model/"): checkpoint.read(name)
        for name in checkpoint.names()
        if name.startswith("model/")
    }


def newest(run: Path) -> Checkpoint:
    path = find_newest(run / "checkpoints").path
    assert path is not None
    return Checkpoint.open(path)


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the values of each read of files from now on."""
    counts: list[int] = []
    read = TensorFiles.read

    def counted(self: TensorFiles, *given: Any) -> torch.Tensor:
        found = read(self, *given)
        counts.append(found.numel())
        return found

    monkeypatch.setattr(TensorFiles, "read", counted)
    return counts


def test_every_row_of_the_table_has_a_case() -> None:
    assert {row_of(model_of(case)).model_type for case in ALL} == TABLE.keys()


@in_parts("case", ALL, default=6, full=2)
def test_from_megapipe_to_transformers_and_back(case: str, tmp_path: Path) -> None:
    model = fp32(case)
    params = init_random(model, seed=5, dtype=torch.float32)
    checkpoint = write_checkpoint(tmp_path / "run", model, params)
    export(checkpoint, tmp_path / "hf", shard_bytes=9000, tokenizer="none")
    assert (tmp_path / "hf/model.safetensors.index.json").is_file()

    tokens, labels, mask = random_batch(model, b=2, s=13, seed=6)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(hf) is class_of(model)
    assert hf.dtype == torch.float32
    mb = MicroBatch(
        index=0, step=0, seed=0, tokens=tokens, labels=labels, mask=mask.bool(), scale=1.0
    )
    stage, _ = new_stage(model, params)
    with torch.no_grad():
        expected = stage.module.logits(None, mb)[..., : model.vocab_size].transpose(0, 1)
        assert (hf(tokens).logits - expected).abs().max() <= 1e-5

    folder = HuggingFaceFolder.open(tmp_path / "hf")
    assert folder.model == model
    import_model(folder, tmp_path / "back", tokenizer="byte", shard_bytes=5000)
    assert_same(tensors_of(newest(tmp_path / "back")), params)
    assert stored_model(newest(tmp_path / "back").config) == model


@pytest.mark.parametrize(
    "case", ["gpt2", "llama_gqa", "llama_mqa_wide_heads", "qwen2", "mixtral", "qwen3_moe", "dots1"]
)
def test_any_region_is_what_it_is_in_the_whole(case: str, tmp_path: Path) -> None:
    model = fp32(case)
    params = init_random(model, seed=5, dtype=torch.float32)
    checkpoint = write_checkpoint(tmp_path / "run", model, params)
    export(checkpoint, tmp_path / "hf", shard_bytes=20000, tokenizer="none")
    folder = HuggingFaceFolder.open(tmp_path / "hf")
    folder.match(folder.shapes())
    with pytest.raises(CheckpointError, match=r"'model/final_norm.weight' has shape \(24,\), .*25"):
        folder.match({**folder.shapes(), "model/final_norm.weight": (25,)})
    draw = random.Random(case)
    for name, tensor in params.items():
        for _ in range(3):
            ends = [sorted(draw.sample(range(n + 1), 2)) for n in tensor.shape]
            region = Region(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
            found = folder.read(f"model/{name}", region)
            assert found.is_contiguous()
            assert torch.equal(found, tensor[tuple(slice(*pair) for pair in ends)]), (name, region)


def test_a_tensor_parallel_rank_reads_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of each tensor that tp 2 splits, and nothing else."""
    model = fp32("llama_gqa").model_copy(update={"vocab_size": 260})
    params = init_random(model, seed=5, dtype=torch.float32)
    checkpoint = write_checkpoint(tmp_path / "run", model, params)
    export(checkpoint, tmp_path / "hf", tokenizer="none")
    folder = HuggingFaceFolder.open(tmp_path / "hf")
    counts = counted_reads(monkeypatch)
    stage = StageSpec(embedding=True, layers=range(model.layers), head=True)
    for name, spec in by_name(stage_parameters(model, stage)).items():
        sizes, offsets = list(spec.shape), [0] * len(spec.shape)
        if spec.split_dim is not None:
            sizes[spec.split_dim] //= 2
            offsets[spec.split_dim] = sizes[spec.split_dim]
        counts.clear()
        folder.read(f"model/{name}", Region(tuple(offsets), tuple(sizes)))
        assert sum(counts) == math.prod(sizes), name


@pytest.mark.parametrize("joined", [False, True])
def test_ranks_read_their_experts_in_either_spelling(
    joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts as files have them, and as state dicts of transformers 5: of two experts half of the
    inner width, and nothing else."""
    model = fp32("mixtral")
    params = init_random(model, seed=5, dtype=torch.float32)
    export(write_checkpoint(tmp_path / "run", model, params), tmp_path / "hf", tokenizer="none")
    names = set(state_of(tmp_path / "hf"))
    assert "model.layers.2.block_sparse_moe.experts.5.w3.weight" in names
    if joined:
        save_file(to_hf(params, model), tmp_path / "hf/model.safetensors")
        names = set(state_of(tmp_path / "hf"))
        assert "model.layers.2.mlp.experts.gate_up_proj" in names
    folder = HuggingFaceFolder.open(tmp_path / "hf")
    assert_same({name: folder.read(f"model/{name}") for name in params}, params)
    counts = counted_reads(monkeypatch)
    up, down = Region((2, 0, 20, 0), (2, 2, 20, 24)), Region((2, 0, 20), (2, 24, 20))
    for kind, region in (("up", up), ("down", down)):
        counts.clear()
        name = f"layers.1.moe.{kind}.weight"
        found = folder.read(f"model/{name}", region)
        assert torch.equal(found, params[name][region.inside(whole(params[name].shape))])
        assert sum(counts) == region.numel


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(("gpt2", "fp32"), ("gpt2_untied_gelu", "bf16"), ("llama_gqa", "fp64"), ("qwen2", "fp16")),
        *(("mixtral", "bf16"), ("qwen3_moe", "fp32"), ("dots1", "bf16")),
    ],
)
def test_from_transformers_to_megapipe_and_back(case: str, dtype: str, tmp_path: Path) -> None:
    """The vocabulary is one that runs pad, and the tokenizer is the model's own."""
    model = fp32(case).model_copy(update={"dtype": dtype})
    torch.manual_seed(3)
    hf = class_of(model)(config_to_hf(model)).to(DTYPES[dtype])
    for module in hf.modules():
        if hasattr(module, "e_score_correction_bias"):  # which stays in fp32 there
            module.e_score_correction_bias = torch.randn(8)
    hf.save_pretrained(tmp_path / "hf", max_shard_size=30_000)
    original = state_of(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1

    folder = HuggingFaceFolder.open(tmp_path / "hf")
    assert folder.model == model
    import_model(folder, tmp_path / "run", tokenizer="byte", shard_bytes=10_000)
    checkpoint = newest(tmp_path / "run")
    assert stored_model(checkpoint.config) == model
    assert checkpoint.step == 0
    given = parse([str(tmp_path / "run/config.yaml")]).config
    assert given.model == model
    assert (given.data.tokenizer, given.checkpoint.load) == ("byte", str(tmp_path / "run"))

    export(checkpoint, tmp_path / "again")
    assert_same(state_of(tmp_path / "again"), original)
    config = AutoConfig.from_pretrained(tmp_path / "again")
    assert config.dtype == DTYPES[dtype]
    assert GenerationConfig.from_pretrained(tmp_path / "again").eos_token_id == 256


def test_masters_are_rounded_as_a_run_does_unless_they_are_asked_for(tmp_path: Path) -> None:
    model = model_of("qwen3").model_copy(update={"dtype": "bf16"})
    params = init_random(model, seed=5, dtype=torch.float32)
    checkpoint = write_checkpoint(tmp_path / "run", model, params)
    export(checkpoint, tmp_path / "bf16", tokenizer="none")
    export(checkpoint, tmp_path / "fp32", tokenizer="none", dtype="fp32")
    whole, rounded = (state_of(tmp_path / name) for name in ("fp32", "bf16"))
    assert_same(rounded, {name: tensor.bfloat16() for name, tensor in whole.items()})
    folder = HuggingFaceFolder.open(tmp_path / "fp32")
    assert folder.model.dtype == "fp32"
    assert_same({n: folder.read(f"model/{n}") for n in params}, params)
    params["final_norm.weight"][3] = 1e5
    large = write_checkpoint(tmp_path / "large", model, params)
    with pytest.raises(CheckpointError, match=r"'model/final_norm.weight' has values up to 100000"):
        export(large, tmp_path / "fp16", tokenizer="none", dtype="fp16")
    assert not (tmp_path / "fp16").exists()
    assert not list(tmp_path.glob(".*")), "what was begun is removed"


def test_files_of_a_model_without_a_head_and_of_old_versions(tmp_path: Path) -> None:
    """Names without a prefix, and buffers that are no weights."""
    model = fp32("gpt2")
    params = init_random(model, seed=5, dtype=torch.float32)
    checkpoint = write_checkpoint(tmp_path / "run", model, params)
    export(checkpoint, tmp_path / "hf", tokenizer="none")
    path = tmp_path / "hf/model.safetensors"
    state = {n.removeprefix("transformer."): t for n, t in state_of(tmp_path / "hf").items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 19, 19, dtype=torch.bool)
    state["lm_head.weight"] = state["wte.weight"].clone()
    save_file(state, path)
    folder = HuggingFaceFolder.open(tmp_path / "hf")
    assert_same({n: folder.read(f"model/{n}") for n in params}, params)
    state["lm_head.weight"][7, 3] += 1
    save_file(state, path)
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from .*wte.weight, but"):
        HuggingFaceFolder.open(tmp_path / "hf")


def test_another_class_that_expresses_the_model_and_one_that_does_not(tmp_path: Path) -> None:
    model = fp32("llama_gqa")
    params = init_random(model, seed=5, dtype=torch.float32)
    checkpoint = write_checkpoint(tmp_path / "run", model, params)
    with pytest.raises(ConfigError, match=r"model.norm = rmsnorm cannot be expressed by .*gpt2"):
        export(checkpoint, tmp_path / "hf", tokenizer="none", model_type="gpt2")
    assert not (tmp_path / "hf").exists()


def test_a_run_folder_gives_its_newest_checkpoint(tmp_path: Path) -> None:
    model = fp32("llama")
    params = init_random(model, seed=5, dtype=torch.float32)
    written = write_checkpoint(tmp_path / "run", model, params)
    assert find_checkpoint(tmp_path / "run", verify=False).path == written.path


def test_the_configuration_of_each_model_is_read_back(tmp_path: Path) -> None:
    for case in ALL:
        model = fp32(case)
        path = tmp_path / f"{case}.yaml"
        path.write_text(as_configuration(model, tokenizer="byte", load=tmp_path))
        config: Any = parse([str(path)]).config
        assert config.model == model
        assert config.checkpoint.load == str(tmp_path)


def test_the_index_names_every_tensor_once(tmp_path: Path) -> None:
    model = fp32("llama_gqa")
    params = init_random(model, seed=5, dtype=torch.float32)
    checkpoint = write_checkpoint(tmp_path / "run", model, params)
    told: list[str] = []
    export(checkpoint, tmp_path / "hf", shard_bytes=1, tokenizer="none", report=told.append)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    state = state_of(tmp_path / "hf")
    assert index["weight_map"].keys() == state.keys()
    assert len(set(index["weight_map"].values())) == len(state) == len(told)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
