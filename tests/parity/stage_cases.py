"""Stages with given weights in one process, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.distributed.mesh import Axis
from megapipe.engine.stage import Stage
from megapipe.layers.activation_policy import BlockSpan
from megapipe.layers.lora_specs import Lora
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layers.parameter import TORCH_DTYPES, Sharding, spec_of
from megapipe.model.gpt.stage import GPTStage
from megapipe.model.partition import StageSpec
from megapipe.ops.compiler import Compiler
from megapipe.ops.kernels import Kernels
from megapipe.optim.buffers import Bucket, owned_parameters
from tests.parity.ranks import take_region


def new_stage(
    model: ModelConfig,
    params: dict[str, Tensor],
    spec: StageSpec | None = None,
    *,
    spans: Sequence[BlockSpan] = (),
    recompute: bool = False,
    compiler: Compiler | None = None,
    lora: Lora | None = None,
) -> tuple[Stage, Bucket]:
    """Build a stage, by default of the whole model, and the bucket of what is trained."""
    if spec is None:
        spec = StageSpec(embedding=True, layers=range(model.layers), head=True)
    kernels = Kernels(compiler=compiler)
    sharding = Sharding(Axis.alone(), False, TORCH_DTYPES[model.dtype], kernels=kernels)
    module = GPTStage(model, spec, sharding, lora=lora)
    for frozen in (True, False) if lora else (False,):
        owned = [o for o in owned_parameters(module) if spec_of(o.parameter).frozen == frozen]
        bucket = Bucket(0, owned, Axis.alone(), torch.device("cpu"), frozen=frozen)
        for entry in bucket.entries:
            take_region(params[entry.spec.name], entry.spec, bucket.view(bucket.weights, entry))
    for layer in module.modules():
        if isinstance(layer, RoutedExperts) and layer.bias is not None:
            layer.bias.copy_(params[f"layers.{layer.layer}.moe.router.bias"])
    stage = Stage(module, spans, recompute=recompute)
    stage.route_autograd_grads()
    return stage, bucket


def new_pipeline(
    model: ModelConfig, params: dict[str, Tensor], counts: Sequence[int], *, recompute: bool = False
) -> tuple[list[Stage], list[Bucket]]:
    """Build stages with `counts` layers each."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    specs = [
        StageSpec(embedding=end == counts[0], layers=range(end - n, end), head=end == sum(counts))
        for n, end in zip(counts, ends, strict=True)
    ]
    made = [new_stage(model, params, spec, recompute=recompute) for spec in specs]
    return [stage for stage, _ in made], [bucket for _, bucket in made]


def main_grads(buckets: Iterable[Bucket]) -> dict[str, Tensor]:
    """Return the main gradients by name, without padding."""
    result = {}
    for bucket in buckets:
        for entry in bucket.entries:
            rows = tuple(slice(n) for n in entry.spec.shape)
            result[entry.spec.name] = bucket.view(bucket.grads[0], entry)[rows].clone()
    return result
