"""megatron-core's GPT on the CPU: a peer of :mod:`peers`.

Layers, attention, the cross-entropy over a split vocabulary, schedules and data parallelism are
megatron-core's own ("local" ones, without Transformer Engine); gloo carries its messages. It
expects a GPU, so what it makes is placed on the CPU (:func:`_on_the_cpu`). Its tracker of random
states is the one for inference, which does not use CUDA's generators: there is no dropout. Its
optimizers take only CUDA tensors; AdamW and clipping are torch's, as for the other peers, and
replicas each update all weights. Its kernels compiled by torch are off: with them a step is no
faster.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from peer_row import Row, Side, adamw, clip
from step import CLIP, initial_weights
from torch import Tensor
from torch.nn import functional

from megapipe.distributed.mesh import ParallelMesh

LAYER_NAMES = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "self_attention.linear_qkv",
    "attn.c_proj": "self_attention.linear_proj",
    "ln_2": "pre_mlp_layernorm",
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.c_proj": "mlp.linear_fc2",
}
OTHER_NAMES = {
    "transformer.wte": "embedding.word_embeddings",
    "transformer.wpe": "embedding.position_embeddings",
    "transformer.ln_f": "decoder.final_layernorm",
    "lm_head": "output_layer",
}
"""Modules of GPT-2's checkpoints, and their names in megatron-core."""


def megatron_side(row: Row, mesh: ParallelMesh) -> Side:
    warnings.filterwarnings("ignore", module=r"megatron\.")  # of Apex, which needs a GPU
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    virtual = row.chunks if row.chunks > 1 else None
    parallel_state.initialize_model_parallel(row.tp, row.pp, virtual)
    initialize_rng_tracker(inference_rng_tracker=True)
    stages = _stages(row, mesh)
    run_schedule = get_forward_backward_func()
    parameters = [p for stage in stages for p in stage.parameters()]
    whole: list[Any] = []
    split: list[Any] = []
    for parameter in parameters:
        own = row.pp > 1 or (row.tp > 1 and _is_split(parameter))
        (split if own else whole).append(parameter)
    optimizer = adamw(parameters)
    s = row.size.sequence
    positions = torch.arange(s)[None]  # [1, s]
    hidden_from = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    batches = row.batches().chunk(row.dp, dim=1)[mesh.at.dp]

    def forward(microbatches: Iterator[Tensor], stage: Any) -> tuple[Tensor, Any]:
        batch = next(microbatches)  # [b, s + 1]
        return stage(batch[:, :-1], positions, hidden_from, labels=batch[:, 1:]), mean

    def mean(losses: Tensor) -> tuple[Tensor, float]:
        loss = losses.mean()
        return loss, float(loss.detach())

    def step(i: int) -> float:
        microbatches = batches[i % len(batches)].split(row.size.batch)
        with _on_the_cpu():
            losses = run_schedule(
                forward_step_func=forward,
                data_iterator=[iter(microbatches) for _ in stages],
                model=stages,
                num_microbatches=row.microbatches,
                seq_length=s,
                micro_batch_size=row.size.batch,
                forward_only=False,
            )
        if row.dp > 1:
            for parameter in parameters:
                parameter.grad = parameter.main_grad
        if split:
            clip([p.grad for p in whole], [p.grad for p in split])
        else:
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if row.dp > 1:
            for stage in stages:
                stage.zero_grad_buffer()
        return statistics.mean(losses) if losses else math.nan

    return step


@contextmanager
def _on_the_cpu() -> Iterator[None]:
    """Give megatron-core the CPU when it asks for the current CUDA device, or for zeros on one."""
    zeros = torch.zeros

    def zeros_on_the_cpu(*args: Any, device: Any = None, **options: Any) -> Tensor:
        return zeros(*args, device="cpu" if device == "cuda" else device, **options)

    with (
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(torch, "zeros", zeros_on_the_cpu),
    ):
        yield


def _stages(row: Row, mesh: ParallelMesh) -> list[Any]:
    """Make this rank's stages, with megapipe's first weights."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    model = row.config()[0].model
    config = TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        ffn_hidden_size=model.ffn_hidden,
        layernorm_epsilon=model.norm_eps,
        activation_func=partial(functional.gelu, approximate="tanh"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,  # kernels for a GPU
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=row.tp,
        pipeline_model_parallel_size=row.pp,
        virtual_pipeline_model_parallel_size=row.chunks if row.chunks > 1 else None,
        pipeline_dtype=torch.float32,
        # two ranks with chunks send both ways to each other: each way needs a separate group
        overlap_p2p_comm=row.chunks > 1,
        batch_p2p_comm=row.chunks == 1,
        batch_p2p_sync=False,
        use_cpu_initialization=True,
    )
    weights = _renamed(initial_weights(row.size, tied=row.pp == 1), model.heads)
    stages: list[Any] = []
    for chunk in range(row.chunks):
        place = {"ignore_virtual": False, "vp_stage": chunk if row.chunks > 1 else None}
        stage = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            model.vocab_size,
            model.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=row.pp == 1,
            vp_stage=place["vp_stage"],
        )
        _load(stage, weights, mesh)
        stages.append(stage)
    if row.dp > 1:
        config.finalize_model_grads_func = finalize_model_grads
        sums = DistributedDataParallelConfig(overlap_grad_reduce=True)
        with _on_the_cpu():
            stages = [DistributedDataParallel(config, sums, stage) for stage in stages]
    return stages


def _renamed(state: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Rename the weights of a `GPT2LMHeadModel`, which keeps linear weights as [in, out], to those
    of megatron-core: [out, in], with query, key and value of one head side by side."""
    renamed = {}
    for name, value in state.items():
        module, _, kind = name.rpartition(".")
        if module in OTHER_NAMES:
            renamed[f"{OTHER_NAMES[module]}.{kind}"] = value
            continue
        layer, _, module = module.removeprefix("transformer.h.").partition(".")
        if value.dim() == 2:
            value = value.t()
        if module == "attn.c_attn":
            value = value.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
        renamed[f"decoder.layers.{layer}.{LAYER_NAMES[module]}.{kind}"] = value
    return renamed


def _load(stage: Any, weights: Mapping[str, Tensor], mesh: ParallelMesh) -> None:
    """Load a stage, which counts its layers from 0 and holds its rank's part of what tensor
    parallelism splits."""
    layers = "decoder.layers."
    first = stage.decoder.layers[0].layer_number - 1
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name.startswith(layers):
                i, _, rest = name.removeprefix(layers).partition(".")
                name = f"{layers}{first + int(i)}.{rest}"
            value = weights[name]
            if _is_split(parameter):
                value = value.chunk(mesh.tp.size, dim=parameter.partition_dim)[mesh.at.tp]
            parameter.copy_(value)


def _is_split(parameter: Any) -> bool:
    """Whether tensor parallelism, of any number of ranks, splits the parameter."""
    return getattr(parameter, "tensor_model_parallel", False)
