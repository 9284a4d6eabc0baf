"""Cases without a flush on the ranks of a world, and their expected results."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.layers.parameter import spec_of
from megapipe.optim.lr import learning_rate
from megapipe.testing import World
from tests.parity import async_reference, reference
from tests.parity.cases import (
    END,
    Case,
    Rows,
    batch_of,
    configure,
    settings,
    validation_rows,
    validation_samples,
)
from tests.parity.dropout_noise import noise_of
from tests.parity.expected import validation
from tests.parity.outcome import (
    Parts,
    assemble,
    local_copies,
    own_grads,
    own_values,
    take_region,
)

TOLERANCE = 1e-10


@dataclass
class StaleOutcome:
    """What one rank saw of a no-flush run."""

    stage_of: dict[str, int] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    known_at: dict[int, int] = field(default_factory=dict)
    """Step with which each result arrived."""
    grads: dict[int, Parts] = field(default_factory=lambda: defaultdict(list))
    first: dict[str, Parts] = field(default_factory=dict)
    """Masters and states before the first step."""
    values: list[dict[str, Parts]] = field(default_factory=list)
    """Masters and states after each step and, if pending updates are made, at the end."""
    copies: Parts = field(default_factory=list)
    """Weights that the rank computes with, at the end."""
    validation: dict[int, float] = field(default_factory=dict)


def begun(world: World, case: Case, device: str = "cpu") -> TrainStep:
    config, layout = configure(case)
    step = TrainStep(config, layout, world.mesh(case.grid, device), document_end=END)
    params = reference.init_random(config.model, seed=3)
    step.optimizer.set_weights(lambda spec, out: take_region(params[spec.name], spec, out))
    return step


def run_stale(
    world: World, case: Case, pauses: Sequence[int] = (), device: str = "cpu"
) -> StaleOutcome:
    """Train a case, with a validation in each of the steps `pauses`."""
    return train(begun(world, case, device), case, pauses)


def train(step: TrainStep, case: Case, pauses: Sequence[int] = (), first: int = 0) -> StaleOutcome:
    outcome = StaleOutcome()
    for stage, module in sorted(step.modules.items(), reverse=True):
        outcome.stage_of |= {spec_of(each).name: stage for each in module.parameters()}
    finish, through = step.optimizer.finish_stage, defaultdict[int, int](lambda: first)

    def spy(index: int) -> Tensor:
        """Record the reduced gradients of a bucket: a stage's, or at one past the last stage the
        tied embedding's."""
        square = finish(index)
        shards = step.optimizer.shards
        buckets = (shard.bucket for shard in shards if shard.bucket.index == index)
        own = {entry.spec.name for bucket in buckets for entry in bucket.entries}
        grads = [shard.grad for shard in shards]
        for shard, grad in zip(shards, grads, strict=True):
            if not len(grad):  # of another stage, before its own
                shard.grad = grad.new_zeros(shard.stop - shard.start)
        outcome.grads[through[index]] += [
            part for part in own_grads(step.optimizer) if part[0] in own
        ]
        for shard, grad in zip(shards, grads, strict=True):
            shard.grad = grad
        through[index] += 1
        return square

    step.optimizer.finish_stage = spy  # type: ignore[method-assign]
    rows = Rows(case)
    outcome.first = own_values(step.optimizer)
    for i in range(first, case.steps):
        known = step.train(i, rows, settle=i in pauses)
        if i in pauses:
            loss = step.evaluate(validation_rows(case), validation_samples(case)).loss
            outcome.validation[i] = loss
        for result in known:
            _note(outcome, result.step, result.loss, result.grad_norm, i)
        outcome.values.append(own_values(step.optimizer))
    for result in step.settle():
        _note(outcome, result.step, result.loss, result.grad_norm, case.steps)
    outcome.values.append(own_values(step.optimizer))
    outcome.copies = list(local_copies(step))
    return outcome


def _note(outcome: StaleOutcome, step: int, loss: float, norm: float, now: int) -> None:
    outcome.losses[step], outcome.norms[step], outcome.known_at[step] = loss, norm, now


def run_stale_cases(world: World, cases: Sequence[Case], device: str = "cpu") -> list[StaleOutcome]:
    results = []
    for case in cases:
        try:
            results.append(run_stale(world, case, device=device))
        except Exception as error:
            error.add_note(f"case: {case.name}")
            raise
    return results


def pipeline_of(case: Case) -> async_reference.Pipeline:
    lead = 2 if case.schedule == "eager_1f1b" else 1
    advance = case.advance or 0
    more = {} if case.correction is None else {"correction": case.correction}
    return async_reference.Pipeline(
        *(case.weights, case.pp, case.m, lead, advance, case.horizon, case.lr_anneal_steps),
        case.synchronous_steps or 0,
        replicas=case.replicas,
        **more,
    )


def expected_windows(case: Case, stage_of: Mapping[str, int]) -> list[async_reference.Window]:
    return _expected(case, tuple(sorted(stage_of.items())))


@functools.lru_cache(maxsize=32)
def _expected(case: Case, stages: tuple[tuple[str, int], ...]) -> list[async_reference.Window]:
    first = reference.init_random(settings(case).model, seed=3)
    return list(expected_from(case, dict(stages), first))


def data_of(case: Case) -> tuple[list[list[reference.Batch]], list[list[reference.Noise | None]]]:
    """Return the micro-batches of each window, of all replicas together, and their dropout."""
    rows = case.batch * case.dp
    windows = []
    noise: list[list[reference.Noise | None]] = []
    for number in range(case.steps):
        whole = batch_of(case, number)
        cuts = [slice(i * rows, (i + 1) * rows) for i in range(case.m)]
        windows.append([(whole[0][cut], whole[1][cut], whole[2][cut]) for cut in cuts])
        drawn = noise_of(case, number)
        noise.append(
            [None if drawn is None else {k: v[cut] for k, v in drawn.items()} for cut in cuts]
        )
    return windows, noise


def expected_from(
    case: Case,
    stage_of: Mapping[str, int],
    first: reference.Params,
    had: Sequence[tuple[reference.Params, dict[str, reference.Params]]] | None = None,
) -> Iterator[async_reference.Window]:
    """Yield each window as the definitions say, from the first weights on. For `had` see
    :func:`tests.parity.async_reference.train`."""
    config = settings(case)
    windows, noise = data_of(case)
    return async_reference.train(
        first,
        config.model,
        windows,
        pipeline_of(case),
        stage_of,
        config.optimizer,
        [learning_rate(config.optimizer, i, case.steps) for i in range(case.steps)],
        end=END if case.documents else None,
        noise=noise,
        had=had,
    )


def stages_of(outcomes: Sequence[StaleOutcome]) -> dict[str, int]:
    """Return the stage that updates each parameter; a tied embedding: the first stage."""
    stage_of: dict[str, int] = {}
    for each in outcomes:
        for name, stage in each.stage_of.items():
            stage_of[name] = min(stage, stage_of.get(name, stage))
    return stage_of


def check_stale(
    case: Case, outcomes: Sequence[StaleOutcome], *, pauses: Sequence[int] = ()
) -> None:
    """Check loss, norm and every gradient of each window, every master and state after it, and the
    loss of each validation with the masters."""
    stage_of = stages_of(outcomes)
    windows = expected_windows(case, stage_of)
    assert windows[-1].loss != windows[0].loss
    for each in outcomes:
        for number, loss in each.validation.items():
            wanted = validation(case, windows[number].params).exact
            _close(f"validation {number}", loss, wanted)
    for number, window in enumerate(windows):
        for each in outcomes:
            _close(f"loss {number}", each.losses[number], window.loss)
            _close(f"norm {number}", each.norms[number], window.norm)
        grads = assemble([each.grads[number] for each in outcomes], window.grads)
        for name, grad in window.grads.items():
            _close_to(f"gradient {number} of {name}", grads[name], grad)
    late = case.weights == "double_buffer"
    for number in range(case.steps + 1):
        pending = (case.synchronous_steps or 0) <= number < case.steps and number not in pauses
        after = number - (late and pending)
        after = min(after, case.steps - 1)
        if after >= 0:
            _check_values(windows[after], [each.values[number] for each in outcomes])


def _check_values(window: async_reference.Window, values: Sequence[Mapping[str, Parts]]) -> None:
    kinds = {kind for each in values for kind in each if kind.startswith("optimizer.")}
    states = {kind.removeprefix("optimizer.") for kind in kinds}
    assert states == {state for of in window.states.values() for state in of}
    for state in ("model", *states):
        kind = "model" if state == "model" else f"optimizer.{state}"
        found = assemble([each.get(kind, []) for each in values], window.params)
        for name, tensor in found.items():
            of = {**window.states[name], "model": window.params[name]}
            if state in of:
                _close_to(f"{kind} of {name}", tensor, of[state])
            else:
                assert not tensor.nan_to_num().any(), f"{name} has a {kind}"


def _close(what: str, found: float, wanted: float) -> None:
    assert abs(found - wanted) <= TOLERANCE * max(1.0, abs(wanted)), f"{what}: {found}, {wanted}"


def _close_to(what: str, found: Tensor, wanted: Tensor) -> None:
    scale = wanted.abs().max().clamp(min=1.0)
    error = (found - wanted).abs().max() / scale
    assert error <= TOLERANCE, f"{what}: off by {error}"
    assert not torch.isnan(found).any(), what


def same_parts(some: Mapping[str, Parts], whole: Mapping[str, Parts]) -> None:
    """Assert that some masters and states are bitwise those of `whole`."""
    for kind, parts in some.items():
        of_all = {(name, str(region)): values for name, region, values in whole[kind]}
        for name, region, values in parts:
            assert (of_all[name, str(region)] == values).all(), f"{kind} of {name}"
