"""A no-flush run, window by window: each starts from the weights and states that the ranks had.

So errors do not accumulate from window to window, and what rounds (narrow types, a sign, a product
of matrices in bf16) is held to the bounds of the parity matrix (:mod:`tests.parity.checking`). The
first weights are known and the first states zero, so the windows together are the whole training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from megapipe.optim.lr import learning_rate
from tests.parity import async_reference, reference
from tests.parity.async_ranks import (
    StaleOutcome,
    data_of,
    expected_from,
    pipeline_of,
    stages_of,
)
from tests.parity.async_reference import Faces, Window
from tests.parity.cases import END, Case, settings
from tests.parity.checking import (
    DRAWS,
    check_ahead,
    check_beginning,
    check_copies,
    compare_gradients,
    copied,
)
from tests.parity.compare import assert_scalar_close, assert_within
from tests.parity.expected import (
    ROUNDING,
    Gradients,
    first_weights,
    mean_loss,
    neighbours,
    of_tokens,
    travel_rounding,
)
from tests.parity.mixture import Told
from tests.parity.outcome import assemble
from tests.parity.reference import Batch, Noise, Params
from tests.parity.updates import Update, Values, rounds, states_of

VELOCITY = "stream.velocity"
"""Name of a state that no rule has."""
HEAD, EMBEDDING = "head.weight", "embedding.word.weight"


def check_windows(case: Case, outcomes: Sequence[StaleOutcome]) -> None:
    """Check loss, every gradient, norm, every master and state of each window, and all replicas at
    the end."""
    stage_of = stages_of(outcomes)
    values = versions(case, outcomes)
    first = first_weights(case)
    velocities = [velocities_of(each) for each in values]
    had = [
        (each["model"], {name: states_of(each, name) | moving.get(name, {}) for name in first})
        for each, moving in zip(values[1:], velocities[1:], strict=True)
    ]
    check_beginning(case, values[0])
    assert not any(delta.any() for of in velocities[0].values() for delta in of.values())
    farther = 0
    for number, window in enumerate(expected_from(case, stage_of, first, had)):
        grads = assemble([each.grads[number] for each in outcomes], first)
        _check_loss(case, number, window, [each.losses[number] for each in outcomes])
        known, errors = _known(case, number, window)
        compare_gradients(case, grads, known, errors)
        for each in outcomes:
            assert_scalar_close("gradient norm", each.norms[number], _norm(grads), 1e-12)
        for stage in sorted(set(stage_of.values())):
            names = [name for name, where in stage_of.items() if where == stage]
            before, after = (
                {kind: {name: of[name] for name in names} for kind, of in each.items()}
                for each in values[number : number + 2]
            )
            own = {name: grads[name] for name in names}
            norm = _norm(own if case.clip_scope == "stage" else grads)
            assert case.clip is None or norm > case.clip, "the clip is not active"
            rate = rate_of(case, stage, number)
            farther += Update(case, before, own, norm, rate, number).check(after)
        _check_velocities(case, window, values[number : number + 2], velocities[number + 1])
    if case.rounding == "stochastic" and rounds(case, values[0]):
        assert farther, "no value was rounded to the farther of its two neighbours"
    copies = [each.copies for each in outcomes]
    if case.look_ahead:
        found, rate = copied(first, copies), rate_of(case, 0, case.steps - 1)
        check_ahead(case, values[-1], found, rate, case.steps)
    else:
        check_copies(case, values[-1]["model"], copies)


def versions(case: Case, outcomes: Sequence[StaleOutcome]) -> list[Values]:
    """Return masters and states after each number of updates. Updates of "double_buffer" are a step
    late, except synchronous ones and the last."""
    late, first = case.weights == "double_buffer", case.synchronous_steps or 0
    places = [number + (late and number >= first) for number in range(case.steps)]
    kept = [[each.first for each in outcomes]]
    kept += [[each.values[place] for each in outcomes] for place in places]
    like = first_weights(case)
    return [
        {
            kind: assemble([of.get(kind, []) for of in ranks], like)
            for kind in {kind: None for of in ranks for kind in of if kind[:6] != "stash."}
        }
        for ranks in kept
    ]


def velocities_of(values: Values) -> dict[str, Params]:
    """Remove the velocities from `values`; return them for weights that have one, by name and
    state."""
    deltas = values.pop(f"optimizer.{VELOCITY}", {})
    return {name: {VELOCITY: d} for name, d in deltas.items() if not d.isnan().all()}


def _check_velocities(
    case: Case, window: Window, values: Sequence[Values], found: Mapping[str, Params]
) -> None:
    """Check that velocities follow the masters before and after the window, up to rounding."""
    wanted = {name: of[VELOCITY] for name, of in window.states.items() if VELOCITY in of}
    unit, (before, after) = ROUNDING["fp64" if case.dtype == "fp64" else "fp32"], values
    allowed = {
        name: 4 * unit * (delta.abs() + before["model"][name].abs() + after["model"][name].abs())
        for name, delta in wanted.items()
    }
    assert_within("velocity", {name: of[VELOCITY] for name, of in found.items()}, wanted, allowed)


def rate_of(case: Case, stage: int, number: int) -> float:
    """Return the learning rate of a stage in a window."""
    rate = learning_rate(settings(case).optimizer, number, case.steps)
    if case.lr_anneal_steps is None:
        return rate
    return rate / pipeline_of(case).annealing(stage, number, case.lr_anneal_steps)


def _check_loss(case: Case, number: int, window: Window, found: Sequence[float]) -> None:
    tokens = {
        dtype: torch.cat(
            [
                of_tokens(faces, model_of(case), dtype, ids, labels, end_of(case), noise)[mask]
                for faces, (ids, labels, mask), noise in _microbatches(case, number, window)
            ]
        )
        for dtype in {"fp64", case.dtype}
    }
    loss = mean_loss(case, tokens["fp64"], tokens[case.dtype])
    assert_scalar_close("loss of the window", window.loss, loss.exact, 1e-12)
    for value in found:
        difference = abs(value - loss.exact)
        assert difference <= loss.allowed, (
            f"loss {value} of window {number} is not {loss.exact}: the difference is "
            f"{difference:.3g}, above {loss.allowed:.3g}"
        )


def _known(case: Case, number: int, window: Window) -> tuple[Gradients, Iterator[Params]]:
    """Return the gradients of a window, and errors of gradients in the case's type."""
    travel = {name: torch.zeros_like(grad) for name, grad in window.grads.items()}
    if error := travel_rounding(case):
        for part in _parts(case, number, window, "fp64", apart=case.tied):
            for name, grad in part.items():
                travel[EMBEDDING if case.tied and name == HEAD else name] += error * grad.abs()
    scales = reference.gradient_scales(window.grads)
    errors = (_errors(case, number, window, draw) for draw in range(DRAWS))
    return Gradients(window.grads, scales, Told(case.batch), travel), errors


def _errors(case: Case, number: int, window: Window, draw: int) -> Params:
    """Return the errors of gradients in the case's type, compared with fp64, at neighbouring
    weights."""
    total = {name: torch.zeros_like(grad) for name, grad in window.grads.items()}
    for sign, dtype in ((1, case.dtype), (-1, "fp64")):
        for part in _parts(case, number, window, dtype, draw):
            for name, grad in part.items():
                total[name] += sign * grad.double()
    return total


def _parts(
    case: Case, number: int, window: Window, dtype: str, draw: int = 0, *, apart: bool = False
) -> Iterator[Params]:
    """Yield the gradients of each micro-batch of each replica, computed in `dtype`. `apart`: the
    tied embedding's uses apart, as if the head had a matrix of its own."""
    model = model_of(case)
    if apart:
        model = model.model_copy(update={"tied_embeddings": False})
    compute, main = reference.COMPUTE_DTYPES[dtype], reference.MASTER_DTYPES[dtype]
    count = sum(int(mask.sum()) for _, _, mask in data_of(case)[0][number])
    for faces, batch, noise in _microbatches(case, number, window):
        near = Faces(*(_near(of, draw, compute) for of in (dict(faces), faces.backward)))
        if apart:
            for face in (near, near.backward):
                face[HEAD] = face[EMBEDDING].clone()
        for start in range(0, len(batch[0]), case.batch):
            rows = slice(start, start + case.batch)
            part = tuple(tensor[rows] for tensor in batch)
            here = None if noise is None else {place: n[rows] for place, n in noise.items()}
            _, grads = async_reference.gradients(near, model, part, count, end_of(case), here)
            yield {name: grad.to(main) for name, grad in grads.items()}


def _near(params: Params, draw: int, dtype: torch.dtype) -> Params:
    given = {name: tensor.detach() for name, tensor in params.items()}
    return {name: tensor.to(dtype, copy=True) for name, tensor in neighbours(given, draw).items()}


def _microbatches(
    case: Case, number: int, window: Window
) -> Iterator[tuple[Faces, Batch, Noise | None]]:
    batches, noise = data_of(case)
    yield from zip(window.read, batches[number], noise[number], strict=True)


def model_of(case: Case) -> reference.ModelConfig:
    return settings(case).model


def end_of(case: Case) -> int | None:
    return END if case.documents else None


def _norm(grads: Params) -> float:
    return math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))
