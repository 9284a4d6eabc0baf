"""Results of the plain single-process reference for a case."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.optim.lr import learning_rate
from tests.parity import reference
from tests.parity.by_position import grads_by_position
from tests.parity.cases import END, Case, batch_of, configure, plain, settings, validation_samples
from tests.parity.dropout_noise import noise_of
from tests.parity.mixture import Told, Wire, of_experts
from tests.parity.reference import Batch, Params
from tests.parity.routing_margins import check_choices

ROUNDING = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of a rounding to the nearest value."""


@functools.lru_cache(maxsize=64)
def expected(case: Case, wire: Wire | None = None) -> tuple[list[reference.Step], float]:
    """Return the steps of AdamW from the first weights on, and the validation loss, of a plain
    case. Rows of experts go through `wire`."""
    config, _ = configure(case)
    params = reference.init_random(config.model, seed=3, lora=config.lora)
    lr = [learning_rate(config.optimizer, i, case.steps) for i in range(case.steps)]
    settings = reference.Optimizer(
        lr=lr, weight_decay=config.optimizer.weight_decay, clip=case.clip
    )
    batches = [batch_of(case, i) for i in range(case.steps)]
    end = document_end(case)
    steps = reference.train(params, config.model, batches, settings, end, case.batch, wire)
    return steps, validation(case, params).exact


def wire_of(case: Case) -> Wire | None:
    """Return the wire that rows of experts go through, or None."""
    if case.codec == "none" and case.topology is None:
        return None
    return Wire(case.codec, case.etp, near_of(case))


def near_of(case: Case) -> tuple[tuple[float, ...], ...]:
    """Return the bandwidths of each sample of the global batch to the experts' ranks. Micro-batches
    go to the data-parallel ranks in turn; neighbouring ranks have the experts, on nodes of `node`
    ranks each."""
    if case.topology is None:
        return ()
    own, near, *far = case.topology
    found = []
    for sample in range(case.batch * case.m * case.dp):
        rank = sample // case.batch % case.dp % case.ep
        line = [near if not far or rank // case.node == i // case.node else far[0]
                for i in range(case.ep)]  # fmt: skip
        line[rank] = own
        found.append(tuple(line))
    return tuple(found)


def told_of(case: Case, given: Sequence[Tensor] = ()) -> Told:
    """Make an empty routing record for layers with experts, under `given` choices."""
    return Told(case.batch, given=given, wire=wire_of(case) or Wire())


def document_end(case: Case) -> int | None:
    return END if case.documents else None


@dataclass
class Loss:
    """A mean loss in fp64, and the error that the case's type may have."""

    exact: float
    allowed: float


@dataclass
class Gradients:
    """Gradients at given weights, fp64."""

    exact: Params
    scales: dict[str, float]
    """Unit of relative errors, per tensor."""
    told: Told
    """Routing record of layers with experts."""
    travel: Params
    """Errors of single elements that narrower types between replicas may add."""


def validation(case: Case, params: Mapping[str, Tensor], given: Sequence[Tensor] = ()) -> Loss:
    """Return the loss of the validation samples, without dropout, under `given` choices of
    experts."""
    rows = validation_samples(case)
    tokens, labels, mask = (t[:rows] for t in batch_of(plain(case), 0))
    return loss_at(case, params, (tokens, labels, mask), None, given)


def loss_at(
    case: Case,
    params: Mapping[str, Tensor],
    batch: Batch,
    noise: reference.Noise | None,
    given: Sequence[Tensor] = (),
) -> Loss:
    """Return the loss at these weights, under `given` choices of experts, which are checked."""
    model, end = settings(case).model, document_end(case)
    tokens, labels, mask = batch
    told = [told_of(case, given) for _ in range(2)]
    exact = of_tokens(params, model, "fp64", tokens, labels, end, noise, told[0])[mask]
    rounded = exact
    if case.dtype != "fp64":
        dtype = case.dtype
        rounded = of_tokens(params, model, dtype, tokens, labels, end, noise, told[1])[mask]
        check_choices(model, *told, noise)
    return mean_loss(case, exact, rounded)


def mean_loss(case: Case, exact: Tensor, rounded: Tensor) -> Loss:
    """Return the mean of the tokens' losses; `rounded` are the losses in the case's type.

    In a narrower type than fp64 the mean may be wrong by twice the sum of two errors. One is the
    RMS error of a plain computation's tokens, which no mean exceeds. The other is rounding of the
    fp32 sum: it adds the n tokens of a micro-batch one by one, and addition k rounds a sum of k
    tokens.
    """
    mean = exact.mean().item() if exact.numel() else 0.0
    if case.dtype == "fp64":
        return Loss(mean, 1e-12 * abs(mean))
    of_tokens_alone = (rounded - exact).square().mean().sqrt().item()
    n = case.batch * case.sequence
    roundings = math.sqrt(sum(k * k for k in range(2, n + 1)) / 3) / n  # each uniform
    return Loss(mean, 2 * math.hypot(of_tokens_alone, roundings * ROUNDING["fp32"] * mean))


def of_tokens(
    params: Mapping[str, Tensor],
    model: ModelConfig,
    dtype: str,
    tokens: Tensor,
    labels: Tensor,
    end: int | None,
    noise: reference.Noise | None,
    told: Told | None = None,
) -> Tensor:
    """Return losses [b, s] as fp64, computed in `dtype`."""
    weights = reference.as_computed(params, dtype)
    with torch.no_grad():
        return reference.token_losses(weights, model, tokens, labels, end, noise, told).double()


def gradients_at(
    case: Case,
    params: Mapping[str, Tensor],
    batch: Batch,
    step: int,
    given: Sequence[Tensor] = (),
) -> Gradients:
    """Return the gradients of a step at these weights, under `given` choices of experts."""
    model, end, noise = settings(case).model, document_end(case), noise_of(case, step)
    exact_model = model.model_copy(update={"dtype": "fp64"})
    told = told_of(case, given)
    _, exact = reference.loss_and_grads(params, exact_model, batch, end, noise=noise, told=told)
    return Gradients(
        exact,
        reference.gradient_scales(exact),
        told,
        travelling(case, params, exact_model, batch, noise, given),
    )


def plain_error(
    case: Case, params: Params, batch: Batch, step: int, draw: int, given: Sequence[Tensor] = ()
) -> Params:
    """Return the errors of the reference's gradients in the case's type, compared with fp64.

    Rounding errors are more or less random, and those of the first layers grow on their path.
    `draw` 0 has the errors at these weights, others have them at neighbouring ones, about a
    rounding of bf16 away.
    """
    model, end, noise = settings(case).model, document_end(case), noise_of(case, step)
    params = neighbours(params, draw)
    if draw and case.master == "none":
        params = {name: p.bfloat16().double() for name, p in params.items()}
    exact_model = model.model_copy(update={"dtype": "fp64"})
    told, scale = told_of(case, given), case.loss_scale or 1.0
    _, exact = reference.loss_and_grads(params, exact_model, batch, end, noise=noise, told=told)
    told = told_of(case, given)
    _, rounded = reference.loss_and_grads(
        params, model, batch, end, noise=noise, scale=scale, told=told
    )
    return {name: rounded[name].double() - exact[name] for name in exact}


def neighbours(params: Mapping[str, Tensor], draw: int) -> Params:
    """Return weights about a rounding of bf16 away from these; `draw` 0: these themselves."""
    if not draw:
        return dict(params)
    generator = torch.Generator().manual_seed(draw)
    return {
        name: p * (1 + 2**-8 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        for name, p in params.items()
    }


def travel_rounding(case: Case, *, experts: bool = False) -> float:
    """Return the relative error of reduced gradients, in units of the summed sizes of their terms.
    Gradients of `experts` are reduced over fewer ranks, or more.

    Shards go to their owners. With equal shards of several groups, the sums are exchanged between
    these, and the total goes back: one rounding or three.
    """
    main = "fp64" if case.dtype == "fp64" else "fp32"
    copies = case.grid.num_replicas(over_ep=experts)
    held = has_holders(case) and not case.in_process
    summed = copies > 1 or held if experts else case.replicated
    if case.reduce_dtype in (None, main) or not summed:
        return 0.0
    whole = case.shard_size is None and case.replicas is None
    once = case.zero in (1, 2) and whole and copies > 1
    return (1 if once else 3) * ROUNDING[case.reduce_dtype] * (1 + ROUNDING["bf16"]) ** 2


@functools.lru_cache(maxsize=64)
def has_holders(case: Case) -> bool:
    """Whether several pipeline ranks have the same stage."""
    placement = configure(case)[1].schedule.placement
    return any(len(placement.holders(stage)) > 1 for stage in range(placement.stages))


def travelling(
    case: Case,
    params: Mapping[str, Tensor],
    model: ModelConfig,
    batch: Batch,
    noise: reference.Noise | None,
    given: Sequence[Tensor],
) -> Params:
    """Return the largest error of each gradient that the types of reductions can add."""
    errors = [travel_rounding(case, experts=experts) for experts in (False, True)]
    if not any(errors):
        return {name: torch.zeros_like(params[name]) for name in reference.trained(params)}
    sizes = summed_sizes(case, params, model, batch, noise, given)
    return {name: errors[of_experts(name)] * size for name, size in sizes.items()}


def summed_sizes(
    case: Case,
    params: Mapping[str, Tensor],
    model: ModelConfig,
    batch: Batch,
    noise: reference.Noise | None,
    given: Sequence[Tensor] = (),
) -> Params:
    """Return the sum of |gradient| over micro-batches, over the positions of each rank that shares
    them, and over the uses of a tied embedding. It bounds the sum of sizes of any coarser parts."""
    apart = model.model_copy(update={"tied_embeddings": False})
    uses = dict(params)
    if model.tied_embeddings:
        uses["head.weight"] = params["embedding.word.weight"]
    sizes = {name: torch.zeros_like(uses[name]) for name in reference.trained(uses)}
    count, end = batch[2].sum().item(), document_end(case)
    held = held_positions(case)
    for start in range(0, len(batch[0]), case.batch):
        rows = slice(start, start + case.batch)
        part = tuple(t[rows] for t in batch)
        here = None if noise is None else {place: n[rows] for place, n in noise.items()}
        told = told_of(case, [layer[rows] for layer in given])
        told.wire = replace(told.wire, near=told.wire.near[rows])
        share = part[2].sum().item() / max(count, 1)

        def objective(
            uses: Params,
            part: Any = part,
            noise: reference.Noise | None = here,
            told: Told = told,
            share: float = share,
        ) -> Tensor:
            loss = reference.loss(uses, apart, *part, end, noise, told)
            return share * loss + len(part[0]) / len(batch[0]) * sum(told.terms)

        pieces = iter(grads_by_position(uses, list(itertools.chain(*held)), objective))
        for of_rank in held:
            found = [next(pieces) for _ in of_rank]
            for name, size in sizes.items():
                own = torch.stack([grads[name] for grads in found])
                size += own.abs().sum(0) if of_experts(name) else own.sum(0).abs()
    if "head.weight" in sizes and model.tied_embeddings:
        sizes["embedding.word.weight"] += sizes.pop("head.weight")
    return sizes


def held_positions(case: Case) -> list[list[list[int]]]:
    """Return the positions of each cp rank, by slice and, with experts, by the tp rank that has the
    tokens. The gradients of experts on any rank are sums over these."""
    _, layout = configure(case)
    parts = case.tp if case.moe is not None and case.sequence_parallel else 1
    starts = [0, *itertools.accumulate(layout.slice_lengths)]
    found: list[list[list[int]]] = [[] for _ in range(case.cp)]
    for index, of_rank in enumerate(found):
        for start, length in zip(starts, layout.slice_lengths, strict=False):
            own = [*layout.split.own(start, length, index)]
            size = len(own) // parts
            of_rank += [own[i : i + size] for i in range(0, len(own), size)]
    return found


def first_weights(case: Case) -> Params:
    """Return the first masters of a case, and frozen weights in the model's type; fp64."""
    config = settings(case)
    params = reference.init_random(config.model, seed=3, lora=config.lora)
    master = torch.bfloat16 if case.master == "none" else reference.MASTER_DTYPES[case.dtype]
    begun = reference.as_computed(params, case.dtype)
    begun |= {name: params[name].to(master) for name in reference.trained(params)}
    return {name: weight.double() for name, weight in begun.items()}
