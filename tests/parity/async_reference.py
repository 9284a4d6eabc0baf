"""Training with stale weights in one process, on whole tensors: what no-flush training has to
reproduce.

The published definitions say which version of a stage's weights a micro-batch reads (PipeDream,
1806.03377; PipeDream-2BW, 2006.09503; AMPNet, 1705.09786; WPipe, ICLR'22); no lists of operations
are used. Model and rules are those of :mod:`tests.parity.reference` and
:mod:`tests.parity.plain_rules`; nothing is shared with the package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from tests.parity import plain_rules, reference
from tests.parity.reference import Batch, Noise, Params


@dataclass(frozen=True)
class Pipeline:
    """A row of `ranks`, and windows of `microbatches`. Rank r runs lead x (ranks-1-r) + advance
    forwards ahead of its backwards. With `replicas` stages have several ranks."""

    weights: str
    ranks: int
    microbatches: int
    lead: int = 1
    advance: int = 0
    horizon: str = "update"
    anneal: int | None = None
    synchronous: int = 0
    """Number of windows at the beginning in which nothing is stale."""
    correction: float = math.exp(-2)
    """PipeMare's D."""
    replicas: tuple[int, ...] | None = None
    """Number of ranks of each stage, which take turns; by default one each."""

    def taking_turns(self, stage: int) -> int:
        return self.replicas[stage] if self.replicas else 1

    def ahead(self, stage: int) -> int:
        """Return the forwards of a rank of the stage before its first backward."""
        if self.replicas is None:
            return self.lead * (self.ranks - 1 - stage) + self.advance
        if stage == len(self.replicas) - 1:
            return 0
        own, after = self.replicas[stage], self.replicas[stage + 1]
        whole = after * (self.ahead(stage + 1) + 1) + own + after - 2 * math.gcd(own, after)
        return math.ceil(whole / own)

    def newest(self, stage: int, microbatch: int) -> int:
        """Return the updates of a stage before its forward of a micro-batch, on the rank that runs
        it."""
        turns = self.taking_turns(stage)
        return max(0, (microbatch // turns - self.ahead(stage)) // (self.microbatches // turns))

    def forward(self, stage: int, microbatch: int) -> int:
        """Return the version that a forward reads; forwards that fill the pipeline read existing
        ones."""
        window = microbatch // self.microbatches
        if window < self.synchronous:
            return window
        return max(self.synchronous, self._forward(stage, microbatch))

    def _forward(self, stage: int, microbatch: int) -> int:
        window = microbatch // self.microbatches
        match self.weights:
            case "stash" | "latest" | "correct":
                return self.newest(stage, microbatch)
            case "predict":
                return self.newest(stage, window * self.microbatches)
            case "vertical":
                return self.newest(0, microbatch)
            case "double_buffer":
                return max(0, window - 1)
            case "double_group":  # stages 0 .. ranks-1 are the first group
                return max(0, window - 1) if stage < self.ranks else window
        raise ValueError(self.weights)

    def backward(self, stage: int, microbatch: int) -> int:
        """Return the version that a micro-batch's backward reads."""
        if self.weights in ("latest", "predict", "correct"):
            return microbatch // self.microbatches
        return self.forward(stage, microbatch)

    def staleness(self, stage: int) -> float:
        """Return the mean staleness of a stage's forwards."""
        return {
            "vertical": self.ahead(0) / self.microbatches,
            "double_buffer": 1.0,
            "double_group": float(stage < self.ranks),
        }.get(self.weights, self.ahead(stage) * self.taking_turns(stage) / self.microbatches)

    def annealing(self, stage: int, window: int, steps: int) -> float:
        """Return the divisor of the learning rate (PipeMare's T1): the mean staleness of forwards,
        to the power of the share of steps that is left. Only steps with stale weights count."""
        if window < self.synchronous:
            return 1.0
        gone = min((window - self.synchronous) / steps, 1)
        return max(1.0, self.staleness(stage)) ** (1 - gone)

    def ahead_of(self, version: int, stage: int, microbatch: int) -> int:
        """Return the number of updates by which a version is predicted ahead: up to the
        micro-batch's window, or until it is through at the first stage."""
        if self.weights != "predict" or microbatch // self.microbatches < self.synchronous:
            return 0
        later = stage // 2 // self.microbatches if self.horizon == "round_trip" else 0
        return microbatch // self.microbatches - version + later


class Faces(dict[str, Tensor]):
    """Weights that a forward reads; its backward passes gradients on through others."""

    def __init__(self, forward: Params, backward: Params) -> None:
        super().__init__(forward)
        self.backward = backward


@dataclass
class Window:
    """What a window computed: gradients before clipping, weights and states after its update."""

    loss: float
    grads: Params
    norm: float
    params: Params
    states: dict[str, dict[str, Tensor]]
    """States after the update, by parameter and state."""
    read: list[Faces]
    """Weights that each micro-batch read."""


def train(
    params: Params,
    model: ModelConfig,
    windows: Sequence[Sequence[Batch]],
    pipeline: Pipeline,
    stage_of: Mapping[str, int],
    config: Any,
    rates: Sequence[float],
    *,
    end: int | None = None,
    noise: Sequence[Sequence[Noise | None]] | None = None,
    had: Sequence[tuple[Params, dict[str, dict[str, Tensor]]]] | None = None,
) -> Iterator[Window]:
    """Train windows of micro-batches; `config` is the section ``optimizer``.

    `had` are weights and states after each window's update. With it each following window starts
    from these: windows are computed one by one, and errors do not accumulate.
    """
    history = [{name: tensor.double() for name, tensor in params.items()}]
    published = list(history)
    states: dict[str, dict[str, Tensor]] = {name: {} for name in params}
    seen = [states]
    """The states of each version."""
    velocity = {
        name: torch.zeros_like(tensor)
        for name, tensor in history[0].items()
        if pipeline.weights == "correct" and pipeline.staleness(stage_of[name])
    }
    """Velocities of the newest version, which all backwards read to move it back."""

    def rate(stage: int, number: int) -> float:
        if pipeline.anneal is None:
            return rates[number]
        return rates[number] / pipeline.annealing(stage, number, pipeline.anneal)

    def steps_ahead(name: str) -> float:
        """Return the updates by which weights are predicted ahead of masters."""
        given = config.weight_prediction
        return pipeline.staleness(stage_of[name]) if given == "staleness" else given

    for number, (batches, lr) in enumerate(zip(windows, rates, strict=True)):
        tokens = sum(int(mask.sum()) for _, _, mask in batches)
        grads = {name: torch.zeros_like(tensor) for name, tensor in history[0].items()}
        loss, by_microbatch = 0.0, []
        for i, batch in enumerate(batches):
            k = number * pipeline.microbatches + i

            def read(name: str, version: int, k: int = k) -> Tensor:
                ahead = pipeline.ahead_of(version, stage_of[name], k)
                weight = published[version][name].clone()
                if not ahead or not version:
                    return weight
                of = seen[version][name]
                direction = plain_rules.direction(config, name, weight, of, version)
                return weight - ahead * rate(stage_of[name], version - 1) * direction

            forward, backward = (
                {name: read(name, version(stage_of[name], k)) for name in history[0]}
                for version in (pipeline.forward, pipeline.backward)
            )
            if number >= pipeline.synchronous:
                for name, delta in velocity.items():
                    backward[name] = backward[name] - pipeline.staleness(stage_of[name]) * delta
            given = None if noise is None else noise[number][i]
            by_microbatch.append(Faces(forward, backward))
            value, own = gradients(by_microbatch[-1], model, batch, tokens, end, given)
            loss += value
            for name, grad in own.items():
                grads[name] += grad
        factors = _factors(grads, stage_of, config)
        after = {}
        for name, weight in history[-1].items():
            grad = grads[name] * factors[stage_of[name]]
            after[name], states[name] = plain_rules.step(
                config,
                name,
                weight,
                grad,
                states[name],
                rate(stage_of[name], number),
                number,
                model=model,
            )
        stepped = after, {name: dict(of) for name, of in states.items()}
        if had is not None:
            after, states = had[number][0], dict(had[number][1])
        for name, delta in velocity.items():
            gamma = pipeline.correction ** (1 / pipeline.staleness(stage_of[name]))
            moved = gamma * delta + (1 - gamma) * (after[name] - history[-1][name])
            stepped[1][name]["stream.velocity"] = moved
            velocity[name] = states[name].get("stream.velocity", moved)
        history.append(after)
        published.append(
            {
                name: plain_rules.predicted(
                    config, name, weight, states[name], steps_ahead(name) * lr, number + 1
                )
                for name, weight in after.items()
            }
            if config.weight_prediction
            else after
        )
        seen.append({name: dict(of) for name, of in states.items()})
        yield Window(loss, grads, _norm(grads.values()), *stepped, by_microbatch)


def gradients(
    faces: Faces,
    model: ModelConfig,
    batch: Batch,
    tokens: int,
    end: int | None,
    noise: Noise | None,
) -> tuple[float, Params]:
    """Return a micro-batch's part of the mean loss over `tokens` tokens, and its gradients."""
    for tensor in faces.values():
        tensor.requires_grad_()
    ids, labels, mask = batch
    with two_faced():
        losses = reference.token_losses(faces, model, ids, labels, end, noise)
    value = (losses * mask.to(losses.dtype)).sum() / max(tokens, 1)
    grads = torch.autograd.grad(value, list(faces.values()))
    return value.item(), dict(zip(faces, grads, strict=True))


def two_faced() -> mock._patch[Any]:
    """Patch products and norms of the reference so that input gradients pass through the backward's
    weights. The value and the weight gradient come from the input and the forward's weights
    alone."""

    def faced(name: str) -> Any:
        plain = getattr(reference, name)

        def both(x: Tensor, params: Mapping[str, Tensor], *where: Any) -> Tensor:
            if not isinstance(params, Faces):
                return plain(x, params, *where)
            value = plain(x.detach(), dict(params), *where)
            passed = plain(x, params.backward, *where)
            return value + (passed - passed.detach())

        return both

    names = ("_linear", "_half", "_norm", "_head_norm")
    return mock.patch.multiple(reference, **{name: faced(name) for name in names})


def _factors(grads: Params, stage_of: Mapping[str, int], config: Any) -> dict[int, float]:
    """Return, for each stage, the factor that clips its gradients."""
    stages = sorted(set(stage_of.values()))
    if config.max_grad_norm is None:
        return dict.fromkeys(stages, 1.0)
    norms = dict.fromkeys(stages, _norm(grads.values()))
    if config.clip_scope == "stage":
        norms = {
            stage: _norm(grad for name, grad in grads.items() if stage_of[name] == stage)
            for stage in stages
        }
    return {stage: min(1.0, config.max_grad_norm / (norm + 1e-6)) for stage, norm in norms.items()}


def _norm(grads: Any) -> float:
    return math.sqrt(sum(grad.square().sum().item() for grad in grads))
