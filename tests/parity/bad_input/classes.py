"""Classes of transformers that a run cannot take (``model.source=hf:...``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from tests.parity.bad_folder import gone, in_config, in_shard, text
from tests.parity.bad_input.case import Bad, Prepare, all_of


def hf(name: str, words: tuple[str, ...], prepare: Prepare, more: str = "", code: int = 2) -> Bad:
    """Return a mistake in the folder ``hf``, from which a run is started."""
    return Bad(name, f"model.source=hf:hf {more}", code, words, prepare, without=("model.",))


ALONE = "model.source=hf:hf/config.json"


def nothing(folder: Path) -> None:
    """Leave the folder as it is."""


def only_config(folder: Path) -> None:
    for path in (folder / "hf").glob("*.safetensors*"):
        path.unlink()


def of_class(**config: object) -> Prepare:
    """Replace the folder by the configuration of another class."""

    def replaced(folder: Path) -> None:
        shutil.rmtree(folder / "hf")
        (folder / "hf").mkdir()
        (folder / "hf/config.json").write_text(json.dumps(config))

    return replaced


CLASSES = [
    Bad("a class that is nowhere", "model.source=hf:gone", 2,
        ("model.source=hf:gone: model 'gone': no such file or folder",), without=("model.",)),
    Bad("a run from a class that is nowhere", "hf:./gone", 2, ("hf:./gone", "gone"),
        without=("model.",)),
    hf("a class with sizes of the built-in model", ("model.layers", "hf:hf"), nothing,
       "model.layers=3"),
    hf("a class with another vocabulary", ("model.vocab_size=300", "257"), nothing,
       "model.vocab_size=300"),
    hf("a class with an option", ("model.options.width", "trust_remote_code"), nothing,
       "model.options.width=3"),
    hf("a class without weights", ("model.safetensors", "hf:hf/config.json"), only_config),
    hf("a class whose configuration is no JSON", ("hf:hf", "config"),
       text("hf/config.json", "{")),
    hf("a class that transformers does not know", ("hf:hf", "nonesuch"),
       in_config(model_type="nonesuch")),
    hf("a class with code of its own", ("not run", "model.options.trust_remote_code=true"),
       all_of(text("hf/own.py", "class Own: pass"),
              in_config(model_type="own", auto_map={"AutoConfig": "own.Own"}))),
    hf("a class with code that is refused", ("model.options.trust_remote_code=true", "refuse"),
       in_config(model_type="own", auto_map={"AutoConfig": "own.Own"}),
       "model.options.trust_remote_code=true run.user_code=refuse"),
    hf("a class that is quantized", ("quantized", "bf16"),
       in_config(quantization_config={"quant_method": "fp8"})),
    hf("a class without a tensor", ("model.norm.weight", "index.json but not in model-00002"),
       in_shard(lambda state: state.pop("model.norm.weight"))),
    hf("a class with more layers than its weights",
       ("model.layers.2.self_attn.q_proj.weight of", "no such tensor"),
       in_config(num_hidden_layers=3)),
    hf("a class with a tensor of another shape", ("lm_head.weight", "(3, 4)", "expected (257,"),
       in_shard(lambda state: state.update({"lm_head.weight": torch.ones(3, 4)}))),
    hf("a class without a shard", ("shard model-00002",),
       gone("hf/model-00002-of-00002.safetensors")),
    hf("a class that translates", ("hf:hf", "T5"), of_class(model_type="t5"),
       ALONE),
    hf("a class with arguments that depend on tokens",
       ("DeepseekV4ForCausalLM cannot be cut into stages", "depends on the tokens"),
       of_class(model_type="deepseek_v4"), ALONE),
    hf("a class with attention of its own over context parallelism",
       ("parallel.cp=2", "with masks as patterns it fails"),
       of_class(model_type="bloom", vocab_size=257), f"{ALONE} parallel.cp=2"),
    hf("a class with attention of its own and a document mask",
       ("data.document_mask", "with masks as patterns it fails"),
       of_class(model_type="bloom", vocab_size=257), f"{ALONE} data.document_mask=true"),
    hf("a class with adapters of a layer that it lacks",
       ("lora.targets=['nonesuch']", "expected all, or some of q_proj, k_proj"), nothing,
       "lora.rank=2 lora.targets=[nonesuch]"),
    hf("a class with adapters on random weights", ("lora.rank=2", "checkpoint.load=FOLDER"),
       nothing, f"{ALONE} lora.rank=2"),
    hf("a dense class with experts on several ranks", ("parallel.ep=2", "has no experts"), nothing,
       "parallel.ep=2"),
    hf("a class over sequence parallelism", ("parallel.sequence_parallel", "model.source"), nothing,
       "parallel.tp=2 parallel.sequence_parallel=true"),
    hf("a class with compiled layers", ("kernels.compile=true", "model.source"), nothing,
       "kernels.compile=true"),
    hf("a class without a flush", ("model.source",), nothing,
       "parallel.pp=2 pipeline.weight_versions=stash"),
]  # fmt: skip
