"""A training loop on megatron-core: its layers, tensor-parallel cross-entropy, 1F1B, gradient
buffers, optimizer, clipping and learning rate, on gloo.

Layers are megatron-core's local ones, without Transformer Engine. It expects a GPU and gets the
CPU. Tests that import this module are skipped if megatron-core is not installed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megapipe.launch.local import World
from tests.external.megatron_models import GATED, form_of
from tests.external.recipe import Recipe
from tests.external.stand_ins import InDouble, cuda_is_the_cpu

pytest.importorskip("megatron.core")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import TransformerConfig


class Rank(NamedTuple):
    """What one rank reports of its run."""

    losses: list[float]
    """Mean loss of its replica's micro-batches in each step; empty without the last stage."""
    norms: list[float]
    apart: dict[str, float]
    """For each tensor, the largest difference of its part from the weights of `other`."""


def train(world: World, recipe: Recipe, folder: Path, rows: Tensor, other: Path) -> Rank:
    """Train on rows [steps x batch, s + 1] from the weights of `folder`, and compare with those of
    `other`."""
    renamed = form_of(recipe.model).renamed
    first, last = (renamed(load_file(each / "model.safetensors")) for each in (folder, other))
    world.restart()
    with cuda_is_the_cpu(), InDouble() if recipe.wide else nullcontext():
        return _train(recipe, first, rows, last)


def _train(
    recipe: Recipe, first: Mapping[str, Tensor], rows: Tensor, last: Mapping[str, Tensor]
) -> Rank:
    parallel_state.initialize_model_parallel(recipe.tp, recipe.pp)
    initialize_rng_tracker(inference_rng_tracker=True)  # there is no dropout
    model = _model(recipe)
    with torch.no_grad():
        for parameter, value in _parts(model, first).values():
            parameter.copy_(value)
    sums = DistributedDataParallelConfig(overlap_grad_reduce=False)
    replica = DistributedDataParallel(model.config, sums, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=recipe.lr,
            min_lr=recipe.min_lr,
            weight_decay=recipe.weight_decay,
            adam_beta1=recipe.beta1,
            adam_beta2=recipe.beta2,
            adam_eps=recipe.eps,
            clip_grad=recipe.clip,
        ),
        [replica],
        use_gloo_process_groups=False,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=recipe.lr / (recipe.warmup + 1),
        max_lr=recipe.lr,
        min_lr=recipe.min_lr,
        lr_warmup_steps=recipe.warmup,
        lr_decay_steps=recipe.steps - 1,
        lr_decay_style="cosine",
        start_wd=recipe.weight_decay,
        end_wd=recipe.weight_decay,
        wd_incr_steps=recipe.steps,
        wd_incr_style="constant",
    )
    run_schedule = get_forward_backward_func()
    at = parallel_state.get_data_parallel_rank()
    microbatches = iter(rows.split(recipe.microbatch)[at :: recipe.dp])
    positions = torch.arange(recipe.sequence)[None]  # [1, s]
    hidden_from = torch.ones(1, 1, recipe.sequence, recipe.sequence, dtype=torch.bool).triu(1)

    def forward(batches: Iterator[Tensor], stage: Any) -> tuple[Tensor, Any]:
        batch = next(batches)  # [b, s + 1]
        return stage(batch[:, :-1], positions, hidden_from, labels=batch[:, 1:]), mean

    def mean(losses: Tensor) -> tuple[Tensor, float]:
        loss = losses.mean()
        return loss, loss.item()

    found = Rank([], [], {})
    for _ in range(recipe.steps):
        replica.zero_grad_buffer()
        optimizer.zero_grad()
        count = recipe.batch // (recipe.microbatch * recipe.dp)
        losses = run_schedule(
            forward_step_func=forward,
            data_iterator=microbatches,
            model=replica,
            num_microbatches=count,
            seq_length=recipe.sequence,
            micro_batch_size=recipe.microbatch,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        scheduler.step(1)
        found.norms.append(norm)
        if losses:
            found.losses.append(sum(losses) / count)
    for name, (parameter, value) in _parts(model, last).items():
        found.apart[name] = (parameter - value).abs().max().item()
    return found


def _model(recipe: Recipe) -> Any:
    dtype = torch.float64 if recipe.wide else torch.float32
    form = form_of(recipe.model)
    config = TransformerConfig(
        num_layers=recipe.model.num_hidden_layers,
        hidden_size=recipe.model.hidden_size,
        num_attention_heads=recipe.model.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,  # a GPU kernel
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=recipe.tp,
        pipeline_model_parallel_size=recipe.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        batch_p2p_sync=False,
        use_cpu_initialization=True,
        finalize_model_grads_func=finalize_model_grads,
        **form.transformer,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        recipe.model.vocab_size,
        recipe.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **form.model,
    )
    return model.to(dtype)  # norms have torch's default


def _parts(model: Any, weights: Mapping[str, Tensor]) -> dict[str, tuple[Any, Tensor]]:
    """Return this rank's parameters, each with its part of whole weights. A stage counts its layers
    from 0."""
    layers = "decoder.layers."
    first = model.decoder.layers[0].layer_number - 1
    found = {}
    for name, parameter in model.named_parameters():
        if name.startswith(layers):
            i, _, rest = name.removeprefix(layers).partition(".")
            name = f"{layers}{first + int(i)}.{rest}"
        value = weights[name]
        if getattr(parameter, "tensor_model_parallel", False):
            gated = model.config.gated_linear_unit and name.endswith(GATED)
            value = _share(value, parameter.partition_dim, gated=gated)
        found[name] = (parameter, value)
    return found


def _share(value: Tensor, dim: int, *, gated: bool) -> Tensor:
    """Return this tensor-parallel rank's part of a tensor; of each half if it holds two
    matrices."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    halves = value.chunk(2 if gated else 1, dim)
    return torch.cat([half.chunk(ranks, dim)[rank] for half in halves], dim)
