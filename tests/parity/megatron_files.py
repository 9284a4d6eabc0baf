"""Folders in Megatron-LM's formats, made of global tensors, for tests without Megatron-LM.

``tests/external`` has folders that megatron-core itself writes.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.layers.specs import by_name
from megapipe.model.gpt.parameters import stage_parameters
from megapipe.model.partition import StageSpec
from tests.parity.dcp_files import save_dcp

Spelling = Literal["local", "te"]
"""Whether norms are modules of their own, or within the linear layer behind them."""
Form = Literal["stacked", "layers", "halves"]
"""Layers as a dimension; with tensors of their own; or these, with a gate's halves as two
tensors."""

_NAMES = {
    "embedding.word": "embedding.word_embeddings.",
    "embedding.position": "embedding.position_embeddings.",
    "final_norm": "decoder.final_layernorm.",
    "head": "output_layer.",
    "attention.qkv": "self_attention.linear_qkv.",
    "attention.q_norm": "self_attention.q_layernorm.",
    "attention.k_norm": "self_attention.k_layernorm.",
    "attention.out": "self_attention.linear_proj.",
    "mlp.up": "mlp.linear_fc1.",
    "mlp.down": "mlp.linear_fc2.",
}
_NORMS = {
    "local": {"attention_norm": "input_layernorm.", "mlp_norm": "pre_mlp_layernorm."},
    "te": {
        "attention_norm": "self_attention.linear_qkv.layer_norm_",
        "mlp_norm": "mlp.linear_fc1.layer_norm_",
    },
}


def args_of(model: ModelConfig, **more: Any) -> Namespace:
    """Return the arguments of a run that trains a resolved model, and some others that belong to
    it."""
    biased = model.bias and not model.gated
    return Namespace(
        **{
            "num_layers": model.layers,
            "hidden_size": model.hidden,
            "num_attention_heads": model.heads,
            "group_query_attention": model.kv_heads != model.heads,
            "num_query_groups": model.kv_heads if model.kv_heads != model.heads else 1,
            "kv_channels": model.head_dim,
            "ffn_hidden_size": model.ffn_hidden,
            "padded_vocab_size": model.vocab_size,
            "max_position_embeddings": model.max_positions,
            "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
            "norm_epsilon": model.norm_eps,
            "position_embedding_type": {"learned": "learned_absolute", "rotary": "rope"}[
                model.positions
            ],
            "rotary_base": int(model.rope.base),
            "rotary_percent": model.rope.percent,
            "swiglu": model.activation == "swiglu",
            "add_bias_linear": model.bias,
            "add_qkv_bias": bool(model.qkv_bias),
            "bias_gelu_fusion": biased and model.activation == "gelu_tanh",
            "qk_layernorm": model.qk_norm,
            "untie_embeddings_and_output_weights": not model.tied_embeddings,
            "hidden_dropout": model.dropout,
            "attention_dropout": model.dropout,
            "init_method_std": model.init_std,
            "window_size": None if model.sliding_window is None else (model.sliding_window - 1, 0),
            "params_dtype": torch.float32,
            "num_experts": None,
            **more,
        }
    )


def write_legacy(
    folder: Path,
    model: ModelConfig,
    params: Mapping[str, Tensor],
    *,
    tp: int = 1,
    stages: Sequence[range] = (),
    chunks: int = 1,
    spelling: Spelling = "te",
    beside: Mapping[str, Any] | None = None,
    **args: Any,
) -> Path:
    """Write a folder with a tracker and iteration 100, a file for each rank. `stages` are the
    layers of each stage; a rank has `chunks` stages. `beside` goes into each file."""
    stages = stages or [range(model.layers)]
    pp = len(stages) // chunks
    given = args_of(model, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **args)
    for rank in range(tp):
        for stage in range(pp):
            states = [
                _state(model, params, stages, chunk * pp + stage, rank, tp, spelling)
                for chunk in range(chunks)
            ]
            models = {f"model{i}": x for i, x in enumerate(states)} if chunks > 1 else None
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            path = folder / "iter_0000100" / name / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            content = {
                "args": given,
                "checkpoint_version": 3.0,
                "iteration": 100,
                **(models or {"model": states[0]}),
                **(beside or {}),
            }
            torch.save(content, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def _state(
    model: ModelConfig,
    params: Mapping[str, Tensor],
    stages: Sequence[range],
    stage: int,
    rank: int,
    tp: int,
    spelling: Spelling,
) -> dict[str, Any]:
    """Return a rank's state dict of a stage, whose layers count from 0."""
    spec = StageSpec(embedding=stage == 0, layers=stages[stage], head=stage == len(stages) - 1)
    state: dict[str, Any] = {}
    for own in stage_parameters(model, spec):
        part = params[own.name]
        if own.split_dim is not None:
            part = part.chunk(tp, dim=own.split_dim)[rank]
        theirs, layer = _name(own.name, spelling), stages[stage].start
        if own.use == 1:  # a tied head, which stages without the embedding have
            if spec.embedding:
                continue
            theirs = "output_layer.weight"
        if theirs.startswith("decoder.layers."):
            number, _, rest = theirs.removeprefix("decoder.layers.").partition(".")
            theirs = f"decoder.layers.{int(number) - layer}.{rest}"
        state[theirs] = _one_after_the_other(own.name, part, model).clone()
        if spelling == "te" and theirs.endswith("linear_qkv.weight"):
            state[theirs.replace("weight", "_extra_state")] = None
    return state


def write_distributed(
    folder: Path,
    model: ModelConfig,
    params: Mapping[str, Tensor],
    *,
    form: Form = "stacked",
    beside: Mapping[str, Tensor] | None = None,
    **args: Any,
) -> Path:
    """Write an iteration of torch_dist, one shard per tensor; `beside` are further tensors."""
    folder.mkdir(parents=True)
    whole = StageSpec(embedding=True, layers=range(model.layers), head=True)
    state: dict[str, Tensor] = dict(beside or {})
    layers: dict[str, list[Tensor]] = {}
    for name in by_name(stage_parameters(model, whole)):
        theirs, tensor = _name(name, "te"), _one_after_the_other(name, params[name], model)
        if form == "stacked" and theirs.startswith("decoder.layers."):
            rest = theirs.removeprefix("decoder.layers.").partition(".")[2]
            layers.setdefault(f"decoder.layers.{rest}", []).append(tensor)
        elif form == "halves" and model.gated and "linear_fc1." in theirs and "norm" not in theirs:
            state[f"{theirs}_w"], state[f"{theirs}_v"] = tensor.chunk(2)
        else:
            state[theirs] = tensor
    state |= {name: torch.stack(tensors) for name, tensors in layers.items()}
    save_dcp(state, folder)
    torch.save({"args": args_of(model, **args), "iteration": 100}, folder / "common.pt")
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(said))
    return folder


def _name(name: str, spelling: Spelling) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return _NAMES[module] + kind
    _, number, inner = module.split(".", 2)
    return f"decoder.layers.{number}.{(_NAMES | _NORMS[spelling])[inner]}{kind}"


def _one_after_the_other(name: str, tensor: Tensor, model: ModelConfig) -> Tensor:
    """Concatenate a gate and the matrix that it multiplies."""
    if model.gated and ".mlp.up." in name:
        return torch.cat(tensor.unbind())
    return tensor
