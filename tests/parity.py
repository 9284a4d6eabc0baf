"""Running cases of the parity matrix: any layout against the plain single-process reference."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import reference
import torch
from torch import Tensor

from megapipe.checkpoint.boxes import Box, flat_boxes, intersect, whole
from megapipe.config import Config
from megapipe.layout import Layout, resolve
from megapipe.mesh import Grid
from megapipe.optim.lr import learning_rate
from megapipe.optim.optimizer import Optimizer
from megapipe.schedule.generators import build, gpipe_on
from megapipe.schedule.ir import Schedule
from megapipe.tensor_parallel.parameter import ParameterSpec, spec_of
from megapipe.testing import World
from megapipe.train.step import TrainStep

STEPS = 3
LR = 1e-3
"""Peak learning rate. Adam moves a weight whose true gradient is zero (a key bias's) by rounding
errors of about 1e-17 x lr / eps; at this rate that stays under the tolerance."""
END = 5
"""The token that ends a document."""
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Case:
    """One layout of one small model. Defaults are the plainest."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int | None = None
    m: int = 2
    schedule: str = "1f1b"
    group: int | None = None
    slices: int | None = None
    pairs: int | None = None
    swap: bool = False
    """Run gpipe instead, on the schedule's placement, replicas, slices and parts."""
    in_process: bool = False
    sequence_parallel: bool = False
    zero: int = 1
    shard_size: int | None = None
    prefetch: int = 1
    reduce_dtype: str | None = None
    offload: str = "none"
    post_validation: bool = False
    activations: str = "keep"
    loss_chunk: int | None = None
    compile: bool = False
    model: str = "gpt2"
    tied: bool = True
    uneven: bool = False
    vocab: int = 300
    kv_heads: int | None = None
    masked: float = 0.0
    documents: bool = False
    """Attention ends at documents, of about four tokens."""
    dtype: str = "fp64"
    dropout: float = 0.0
    clip: float | None = 0.05
    debug: bool = False
    layers: int = 4
    batch: int = 2
    sequence: int = 8

    @property
    def world(self) -> int:
        return self.dp * self.tp * (1 if self.in_process else self.pp)

    @property
    def name(self) -> str:
        """The fields that differ from the defaults."""
        default = Case()
        return " ".join(
            f"{key}={value}" for key, value in vars(self).items() if value != getattr(default, key)
        )


MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "norm": "rmsnorm",
        "positions": "rotary",
        "activation": "swiglu",
        "bias": False,
        "ffn_hidden": 48,
    },
    "mixed": {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "ffn_hidden": 24},
    "gelu": {"activation": "gelu", "positions": "rotary", "bias": False},
}


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "keep": {},
    "stage": {"policy": "stage"},
    "full": {"policy": "full"},
    "full, two together": {"policy": "full", "unit": 2, "offload": ["norm"]},
    "selective": {"policy": "selective"},
    "selective, one block": {"policy": "selective", "blocks": 1, "modules": ["attention"]},
    "offload": {"offload": ["norm", "attention", "mlp_activation"]},
    "of each some": {
        "policy": "selective",
        "modules": ["norm", "mlp_activation"],
        "offload": ["norm", "attention"],
    },
}


def configure(case: Case) -> tuple[Config, Layout]:
    """The resolved configuration of a case."""
    layout: str | None = None
    if case.uneven and (stages := _stages(case)) > 1:
        # everything that is left on the second stage, one layer on the others
        counts = [1] * stages
        counts[1] += case.layers - stages
        layout = " | ".join(f"L*{n}" for n in counts)
        layout = f"E {layout} H"
    config = Config.model_validate(
        {
            "run": {"seed": 7},
            "model": {
                "layers": case.layers,
                "hidden": 16,
                "heads": 4,
                "kv_heads": case.kv_heads,
                "vocab_size": case.vocab,
                "tied_embeddings": case.tied,
                "dropout": case.dropout,
                "dtype": case.dtype,
                **MODELS[case.model],
            },
            "parallel": {
                "dp": case.dp,
                "tp": case.tp,
                "pp": case.pp,
                "sequence_parallel": case.sequence_parallel,
            },
            "pipeline": {
                "schedule": case.schedule,
                "chunks": case.chunks,
                "group": case.group,
                "slices": case.slices,
                "pairs": case.pairs,
                "layout": layout,
                "channels": "in_process" if case.in_process else "process_group",
                "debug": case.debug,
            },
            "activations": ACTIVATIONS[case.activations],
            "kernels": {"loss_chunk": case.loss_chunk, "compile": case.compile},
            "data": {"document_mask": case.documents},
            "optimizer": {
                "lr": LR,
                "min_lr": LR / 10,
                "warmup_steps": 1,
                "clip": case.clip,
                "zero": case.zero,
                "shard_size": case.shard_size,
                "prefetch": case.prefetch,
                "reduce_dtype": case.reduce_dtype,
                "offload": case.offload,
                "offload_folder": tempfile.gettempdir(),
                "post_validation": case.post_validation,
            },
            "train": {
                "steps": STEPS,
                "sequence_length": case.sequence,
                "global_batch": case.batch * case.m * case.dp,
                "microbatch": case.batch,
            },
        }
    )
    return resolve(config, case.world, case.vocab)


def _stages(case: Case) -> int:
    schedule = build(
        case.schedule, ranks=case.pp, microbatches=case.m, chunks=case.chunks, pairs=case.pairs
    )
    return schedule.placement.stages


@functools.lru_cache(maxsize=64)
def batch_of(case: Case, step: int) -> reference.Batch:
    """The global batch of one step, [samples, s] each, the same for every layout of a size."""
    config, _ = configure(case)
    tokens, labels, mask = reference.random_batch(
        config.model,
        config.train.global_batch,
        case.sequence,
        seed=100 + step,
        masked=case.masked,
    )
    if case.documents:
        tokens[labels % 4 == 0] = END
    return tokens, labels, mask


class Rows:
    """The batches as a source of rows by global sample index."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.size = case.batch * case.m * case.dp

    def __call__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        step = indices[0] // self.size
        rows = [i - step * self.size for i in indices]
        tokens, labels, mask = batch_of(self.case, step)
        return tokens[rows], labels[rows], mask[rows].bool()


@dataclass
class Outcome:
    """What one rank saw: its own share of gradients and weights, and its copies of weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[list[tuple[str, Box, Any]]] = field(default_factory=list)
    copies: list[list[tuple[str, Box, Any]]] = field(default_factory=list)
    validation: float = 0.0


def run_case(world: World, case: Case, *, validate: bool = True, device: str = "cpu") -> Outcome:
    """Train a case for STEPS steps on this rank of a world of `case.world`."""
    config, layout = configure(case)
    grid = Grid(pp=1 if case.in_process else case.pp, dp=case.dp, tp=case.tp)
    mesh = world.mesh(grid, device)
    swapped = as_gpipe(layout.schedule) if case.swap else None
    step = TrainStep(config, layout, mesh, schedule=swapped, document_end=END)
    params = reference.init_random(config.model, seed=3)
    step.optimizer.set_weights(lambda spec, out: take_box(params[spec.name], spec, out))
    return train(step, case, validate=validate)


def as_gpipe(like: Schedule) -> Schedule:
    """All forwards, then all backwards, of the same pieces in the same places."""
    return gpipe_on(
        like.placement,
        like.microbatches,
        replica=like.replica,
        slices=like.slices,
        sizes=like.sizes,
    )


def train(step: TrainStep, case: Case, *, validate: bool) -> Outcome:
    outcome = Outcome()
    rows = Rows(case)
    if validate:
        outcome.validation, _ = step.evaluate(validation_rows(case), validation_samples(case))
    update = step.optimizer.update

    def spy(lr: float, factor: float = 1.0) -> None:
        outcome.grads.append(list(own_grads(step.optimizer)))
        update(lr, factor)

    step.optimizer.update = spy  # type: ignore[method-assign]
    for i in range(STEPS):
        result = step.train(i, rows) or step.settle()
        assert result is not None
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
        outcome.copies.append(list(local_copies(step)))
    for shard in step.optimizer.shards:
        assert not any(grad.requires_grad for grad in shard.bucket.grads), "W built a graph"
    return outcome


def validation_samples(case: Case) -> int:
    """One sample fewer than a step's batch: the last micro-batch is short."""
    return case.batch * case.m * case.dp - 1


def validation_rows(case: Case) -> Any:
    """Rows of step 0's batch, over and over: the step itself has to stop at the samples."""
    tokens, labels, mask = batch_of(case, 0)

    def rows(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        index = [i % len(tokens) for i in indices]
        return tokens[index], labels[index], mask[index].bool()

    return rows


def take_box(full: Tensor, spec: ParameterSpec, out: Tensor) -> None:
    """Copy this rank's box of a full tensor, leaving padding alone."""
    placed = Box(spec.offsets, spec.sizes)
    box = intersect(placed, whole(spec.shape))
    if box is not None:
        out[box.inside(placed)] = full[box.inside(whole(spec.shape))].to(out.dtype)


def _global(
    spec: ParameterSpec, local: Box, values: Tensor
) -> Iterator[tuple[str, Box, np.ndarray[Any, Any]]]:
    offsets = tuple(a + b for a, b in zip(local.offsets, spec.offsets, strict=True))
    placed = Box(offsets, local.sizes)
    box = intersect(placed, whole(spec.shape))
    padding = values.clone()
    if box is not None:
        inside = box.inside(placed)
        yield spec.name, box, values[inside].double().cpu().clone().numpy()
        padding[inside] = 0
    assert not padding.any(), f"{spec.name}: the padding is not zero"


def own_grads(optimizer: Optimizer) -> Iterator[tuple[str, Box, np.ndarray[Any, Any]]]:
    """Reduced gradients of the slices that this rank owns, before clipping."""
    for shard in optimizer.shards:
        for entry in shard.bucket.entries:
            a, b = max(entry.start, shard.own_start), min(entry.stop, shard.own_stop)
            if a >= b or (entry.spec.split_dim is None and optimizer.mesh.tp.index > 0):
                continue
            flat = shard.grad[shard.local(a, b)]
            for position, local in flat_boxes(entry.spec.sizes, a - entry.start, b - entry.start):
                values = flat[position : position + local.numel].view(local.sizes)
                yield from _global(entry.spec, local, values)


def local_copies(step: TrainStep) -> Iterator[tuple[str, Box, np.ndarray[Any, Any]]]:
    """Every weight that this rank computes with."""
    for stage, module in step.modules.items():
        step.optimizer.unshard(stage)
        step.optimizer.await_weights(stage)
        for parameter in module.parameters():
            spec = spec_of(parameter)
            yield from _global(spec, whole(spec.sizes), parameter.detach())
        step.optimizer.reshard(stage)


def assemble(
    parts: Sequence[Sequence[tuple[str, Box, Any]]], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Full tensors from every rank's own parts: each element exactly once."""
    full = {
        name: torch.full(t.shape, float("nan"), dtype=torch.float64) for name, t in like.items()
    }
    for name, box, values in itertools.chain.from_iterable(parts):
        here = box.inside(whole(tuple(full[name].shape)))
        assert full[name][here].isnan().all(), f"{name} {box}: two ranks own it"
        full[name][here] = torch.from_numpy(values)
    return full


@functools.lru_cache(maxsize=64)
def expected(case: Case) -> tuple[list[reference.Step], float]:
    """The reference's steps and its validation loss."""
    config, _ = configure(case)
    params = reference.init_random(config.model, seed=3)
    lr = [learning_rate(config.optimizer, i, STEPS) for i in range(STEPS)]
    settings = reference.Optimizer(
        lr=lr, weight_decay=config.optimizer.weight_decay, clip=case.clip
    )
    batches = [batch_of(case, i) for i in range(STEPS)]
    end = END if case.documents else None
    steps = reference.train(params, config.model, batches, settings, end)
    samples = validation_samples(case)
    tokens, labels, mask = (t[:samples] for t in batch_of(case, 0))
    validation = reference.loss(params, config.model, tokens, labels, mask, end).item()
    return steps, validation


def plain(case: Case) -> Case:
    """The case as the reference sees it: the same model and data, no layout."""
    return replace(
        case,
        dp=1,
        tp=1,
        pp=1,
        chunks=None,
        m=case.m * case.dp,
        schedule="1f1b",
        group=None,
        slices=None,
        pairs=None,
        in_process=False,
        sequence_parallel=False,
        zero=1,
        shard_size=None,
        prefetch=1,
        offload="none",
        post_validation=False,
        uneven=False,
        debug=False,
        activations="keep",
    )


def check_case(case: Case, outcomes: Sequence[Outcome]) -> None:
    """Loss, every gradient, gradient norm, every copy of every weight, validation loss."""
    steps, validation = expected(plain(case))
    for i, ref in enumerate(steps):
        grads = assemble([o.grads[i] for o in outcomes], ref.grads)
        reference.assert_grads_close(grads, ref.grads)
        for outcome in outcomes:
            assert_scalar_close("loss", outcome.losses[i], ref.loss, 1e-12)
            assert_scalar_close("gradient norm", outcome.norms[i], ref.grad_norm, 1e-10)
            for name, box, values in outcome.copies[i]:
                full = ref.params[name]
                here = box.inside(whole(tuple(full.shape)))
                reference.assert_weights_close(
                    {name: torch.from_numpy(values)}, {name: full[here]}, LR
                )
        if case.clip is not None:
            assert ref.grad_norm > case.clip, "the clip is not active"
    for outcome in outcomes:
        assert_scalar_close("validation loss", outcome.validation, validation, 1e-12)


def assert_scalar_close(what: str, actual: float, expected: float, tolerance: float) -> None:
    assert abs(actual - expected) <= tolerance * abs(expected), (
        f"{what} {actual} is not {expected}: relative difference is "
        f"{abs(actual / expected - 1):.3g}, above {tolerance:.3g}"
    )


def run_cases(world: World, cases: Sequence[Case], device: str = "cpu") -> list[Outcome]:
    """All cases of one world size, one after the other."""
    results = []
    for case in cases:
        try:
            results.append(run_case(world, case, device=device))
        except Exception as error:
            error.add_note(f"case: {case.name}")
            raise
    return results
