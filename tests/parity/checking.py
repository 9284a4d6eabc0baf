"""A case's outcomes against the reference: losses, gradients, norms, updates, all replicas.

Each step is checked by itself, from the weights and states that the ranks had before it. So errors
do not accumulate, and a gradient that is zero up to rounding (a key bias's) does no harm under a
rule that divides by its size. The first weights are known and the first states zero, so the steps
together are the whole training. Plain fp64 AdamW is also compared with the reference's own
training, from the first weights to the last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megapipe.checkpoint.regions import whole
from tests.parity import plain_rules, reference
from tests.parity.cases import LR, Case, batch_of, configure, plain, settings, validation_samples
from tests.parity.compare import assert_scalar_close, assert_within
from tests.parity.dropout_noise import noise_of
from tests.parity.expected import (
    ROUNDING,
    Gradients,
    Loss,
    expected,
    first_weights,
    gradients_at,
    loss_at,
    plain_error,
    validation,
    wire_of,
)
from tests.parity.mixture import (
    Told,
    experts_of,
    has_experts,
    kept,
    moved,
    of_experts,
    tells_first,
)
from tests.parity.outcome import Outcome, assemble
from tests.parity.reference import Params
from tests.parity.routing_margins import whole_choices
from tests.parity.routing_noise import is_random
from tests.parity.updates import STEP_ERROR, Update, Values, rounds, spacing, states_of

DRAWS = 32
"""Number of drawn errors of the plain computation in the case's type; the largest one counts. All
may be small: often their size depends on a single place where rounding errors grow."""


def check_case(case: Case, outcomes: Sequence[Outcome]) -> None:
    """Check loss, every gradient, gradient norm, every weight, state and replica, validation
    loss."""
    values = [values_at(case, outcomes, i) for i in range(case.steps + 1)]
    check_beginning(case, values[0])
    given: list[list[Tensor]] = [[] for _ in range(case.steps + 1)]
    if case.dtype != "fp64":  # in fp64 the reference chooses by itself
        given = [choices_at(case, outcomes, i) for i in range(case.steps + 1)]
    held_out = validation(case, values[0]["model"], given[0])
    check_loss("validation loss", [o.validation for o in outcomes], held_out)
    copies = [[o.copies[i] for o in outcomes] for i in range(case.steps)]
    weights = [each["model"] for each in values]
    if case.look_ahead:
        weights[1:] = [copied(values[0]["model"], each) for each in copies]
    learning = {n: values[0]["model"][n] for n in reference.trained(values[0]["model"])}
    grads = [assemble([o.grads[i] for o in outcomes], learning) for i in range(case.steps)]
    if trains_alone(case):
        check_training(case, outcomes, grads)
    farther = 0
    for i in range(case.steps):
        if not trains_alone(case):
            batch, noise = batch_of(plain(case), i), noise_of(case, i)
            loss = loss_at(case, weights[i], batch, noise, given[i + 1])
            check_loss("loss", [o.losses[i] for o in outcomes], loss)
            told = check_gradients(case, weights[i], grads[i], i, given[i + 1])
            check_routing(case, told, outcomes, i)
        norm = math.sqrt(sum(g.square().sum().item() for g in grads[i].values()))
        for outcome in outcomes:
            assert_scalar_close("gradient norm", outcome.norms[i], norm, 1e-12)
        if case.clip is not None:
            assert norm > case.clip, "the clip is not active"
        before, after = (of_trained(each) for each in values[i : i + 2])
        farther += Update(case, before, grads[i], norm, outcomes[0].rates[i], i).check(after)
        check_frozen(values[i]["model"], values[i + 1]["model"])
        check_kept(case, values[i]["model"], values[i + 1]["model"], outcomes[0].routing[i])
        check_copies(case, weights[i + 1], copies[i])
        if case.look_ahead:
            check_ahead(case, values[i + 1], weights[i + 1], outcomes[0].rates[i], i + 1)
    if case.rounding == "stochastic" and rounds(case, values[0]):
        assert farther, "no value was rounded to the farther of its two neighbours"


def trains_alone(case: Case) -> bool:
    """Whether the reference can train by itself and be compared at the end."""
    exact = case.dtype == "fp64" and case.reduce_dtype is None
    random = case.dropout or is_random(case)
    return exact and case.rule == "adamw" and not random and not case.look_ahead


def copied(like: Params, copies: Sequence[Sequence[tuple[str, Any, Any]]]) -> Params:
    """Build whole tensors from the weights of all ranks; the last rank's value counts."""
    full = {name: torch.full_like(tensor, math.nan) for name, tensor in like.items()}
    for name, box, values in itertools.chain.from_iterable(copies):
        full[name][box.inside(whole(tuple(full[name].shape)))] = torch.from_numpy(values)
    return full


def check_ahead(case: Case, values: Values, found: Params, lr: float, count: int) -> None:
    """Check that the weights are those that plain formulas predict from masters and states after
    `count` updates, the last one with `lr`. Rounding in the prediction and to the model's type is
    allowed."""
    config, masters = configure(case)[0].optimizer, of_trained(values)["model"]
    ahead, allowed, distance = dict(values["model"]), {}, int(case.look_ahead) * lr
    for name, master in masters.items():
        states = states_of(values, name)
        ahead[name] = plain_rules.predicted(config, name, master, states, distance, count)
    for name, weight in ahead.items():
        step = (weight - values["model"][name]).abs().max()
        main = "fp64" if case.dtype == "fp64" else "fp32"
        allowed[name] = 8 * ROUNDING[main] * weight.abs() + STEP_ERROR[main] * step
        if case.dtype == "bf16":
            allowed[name] += spacing(weight.abs() + allowed[name])
    assert_within("weight ahead", found, ahead, allowed)
    moved = [name for name, master in masters.items() if not ahead[name].equal(master)]
    assert moved, "no weight is ahead"


def values_at(case: Case, outcomes: Sequence[Outcome], i: int) -> Values:
    """Return weights and states after `i` steps."""
    config, _ = configure(case)
    like = reference.shapes(config.model, config.lora)
    shapes = {name: torch.empty(shape) for name, shape in like.items()}
    learning = {name: shapes[name] for name in reference.trained(shapes)}
    return {
        kind: assemble(
            [o.values[i].get(kind, []) for o in outcomes], shapes if kind == "model" else learning
        )
        for kind in {kind: None for o in outcomes for kind in o.values[i]}
    }


def of_trained(values: Values) -> Values:
    """Return weights and states without frozen weights."""
    names = reference.trained(values["model"])
    return {kind: {name: of[name] for name in names} for kind, of in values.items()}


def check_frozen(before: Params, now: Params) -> None:
    """Check that what is not trained, except router state, is bitwise unchanged."""
    for name in before.keys() - set(reference.trained(before)):
        if not kept(name):
            assert now[name].equal(before[name]), f"{name}: a frozen weight has changed"


def check_kept(case: Case, before: Params, after: Params, told: Sequence[float]) -> None:
    """Check that router state has moved as the step's choices say, bitwise."""
    model, numbers = settings(case).model, list(told)
    counts: list[list[int]] = []
    counted: list[list[int]] = []
    for layer in (n for n in range(model.layers) if has_experts(model, n)):
        experts = experts_of(model, layer)
        del numbers[:4]
        counts.append([int(count) for count in numbers[:experts]])
        if tells_first(model):
            del numbers[:experts]
        counted.append([int(count) for count in numbers[:experts]])
        del numbers[:experts]
    assert not numbers
    main = reference.MASTER_DTYPES[case.dtype]
    held = {name: values.to(main) for name, values in before.items() if kept(name)}
    for name, values in moved(held, model, counts, counted).items():
        assert_kept(name, after[name], values)


def assert_kept(name: str, found: Tensor, wanted: Tensor) -> None:
    wrong = (found - wanted).abs().max().item()
    assert not wrong, f"{name}: the largest difference is {wrong:.3g}"


def check_beginning(case: Case, values: Values) -> None:
    for name, weight in first_weights(case).items():
        assert values["model"][name].equal(weight), f"{name}: not what it was set to"
    for name in reference.trained(values["model"]):
        assert not any(state.any() for state in states_of(values, name).values())


def choices_at(case: Case, outcomes: Sequence[Outcome], i: int) -> list[Tensor]:
    """Return the choices of tokens in validation (0) or a step, for each layer with experts."""
    if case.moe is None:
        return []
    samples = case.batch * case.m * case.dp if i else validation_samples(case)
    found = [o.chosen[i] for o in outcomes]
    return whole_choices(settings(case).model, samples, case.sequence, found)


def check_loss(what: str, found: Sequence[float], loss: Loss) -> None:
    """Compare the loss of every rank."""
    for value in found:
        difference = abs(value - loss.exact)
        assert difference <= loss.allowed, (
            f"{what} {value} is not {loss.exact}: the difference is {difference:.3g}, "
            f"above {loss.allowed:.3g}"
        )


def check_routing(case: Case, told: Told, outcomes: Sequence[Outcome], step: int) -> None:
    """Check which choices MoE layers have dropped, and the routing statistics of every rank: the
    number dropped, counts, and in fp64 the terms."""
    chosen = choices_at(case, outcomes, step + 1)
    for number, (choices, dropped) in enumerate(zip(chosen, told.dropped, strict=True)):
        others = dropped ^ {tuple(each) for each in (choices < 0).nonzero().tolist()}
        assert not others, f"layer {number} of those with experts: {others} are dropped or are not"
    wanted = []
    for balance, z, dropped, counts, counted in zip(
        told.balance, told.z, told.dropped, told.counts, told.counted, strict=True
    ):
        tokens = case.batch * case.m * case.dp * case.sequence
        wanted += [tokens, tokens * balance, tokens * z, len(dropped), *counts]
        wanted += counted if tells_first(settings(case).model) else []
    for values in (outcome.routing[step] for outcome in outcomes):
        for value, exact in zip(values, wanted, strict=True):
            narrow = case.dtype != "fp64" and not isinstance(exact, int)
            assert narrow or abs(value - exact) <= 1e-12 * abs(exact), (
                f"routing {list(values)} is not {wanted}: the difference is {value - exact:.3g}"
            )


def check_gradients(
    case: Case,
    weights: Params,
    grads: Params,
    step: int,
    given: Sequence[Tensor],
) -> Told:
    """Check gradients at the weights that the ranks had, under `given` choices of experts. Return
    the reference's routing record."""
    batch = batch_of(plain(case), step)
    errors = (plain_error(case, weights, batch, step, draw, given) for draw in range(DRAWS))
    known = gradients_at(case, weights, batch, step, given)
    compare_gradients(case, grads, known, errors)
    return known.told


def compare_gradients(
    case: Case, grads: Params, known: Gradients, errors: Iterable[Params]
) -> None:
    """Assert that gradients are as close to the known ones as the case's type allows; `errors` are
    errors of that type."""
    if case.dtype == "fp64":
        local = {name: 1e-10 * scale for name, scale in known.scales.items()}
        allowed = {name: travel + local[name] for name, travel in known.travel.items()}
        assert_within("gradient", grads, known.exact, allowed)
    else:
        check_errors(grads, known, errors)
    if case.dtype in ("fp64", "fp32"):
        check_travelled(case, grads, known)


def check_travelled(case: Case, grads: Params, known: Gradients) -> None:
    """Check that gradients to be reduced in a narrow type have lost what it cannot hold, for
    experts and for other parameters."""
    local = 1e-10 if case.dtype == "fp64" else 64 * ROUNDING[case.dtype]
    limits = {name: local * scale for name, scale in known.scales.items()}
    for kind in (False, True):
        names = [name for name in grads if of_experts(name) == kind]
        if any((known.travel[name] > limits[name]).any() for name in names):
            off = [((grads[n] - known.exact[n]).abs() > limits[n]).any() for n in names]
            whose = "of experts " if kind else ""
            assert any(off), f"no gradient {whose}has travelled in {case.reduce_dtype}"


def check_errors(grads: Params, known: Gradients, errors: Iterable[Params]) -> None:
    """Assert at most twice the error of the plain computation: the largest of those drawn.

    Most gradients pass with the first draw; then no more are drawn.
    """
    largest = {name: torch.zeros_like(grad) for name, grad in known.exact.items()}
    failure: AssertionError | None = None
    for drawn in errors:
        largest = {n: max(e, drawn[n], key=torch.Tensor.norm) for n, e in largest.items()}
        baseline = {name: exact + largest[name] for name, exact in known.exact.items()}
        try:
            reference.assert_error_like(
                grads, baseline, known.exact, slack=known.travel, kind=kind_of
            )
        except AssertionError as error:
            failure = error
        else:
            return
    assert failure is not None
    raise failure


def kind_of(name: str) -> str:
    """Return a name that is equal for a parameter of all layers, and for all norms: "qkv.weight",
    "norm.bias"."""
    *_, module, last = name.split(".")
    return f"{'norm' if module.endswith('norm') else module}.{last}"


def check_copies(
    case: Case, masters: Params, copies: Sequence[Sequence[tuple[str, Any, Any]]]
) -> None:
    """Check that every weight that a rank computes with is the master, or the predicted weight, in
    the model's type."""
    rounded = {n: w.double() for n, w in reference.as_computed(masters, case.dtype).items()}
    for name, box, found in itertools.chain.from_iterable(copies):
        wanted = rounded[name][box.inside(whole(tuple(rounded[name].shape)))]
        assert torch.from_numpy(found).equal(wanted), (
            f"weight {name} {box}: largest difference is "
            f"{(torch.from_numpy(found) - wanted).abs().max():.3g} of a copy from its master"
        )


def check_training(case: Case, outcomes: Sequence[Outcome], grads: Sequence[Params]) -> None:
    """Check losses, gradients, norms and weights of all steps, from the first weights on."""
    steps, _ = expected(plain(case), wire_of(case))
    for i, ref in enumerate(steps):
        reference.assert_grads_close(grads[i], ref.grads)
        check_routing(case, ref.told, outcomes, i)
        for outcome in outcomes:
            assert_scalar_close("loss", outcome.losses[i], ref.loss, 1e-12)
            assert_scalar_close("gradient norm", outcome.norms[i], ref.grad_norm, 1e-10)
        check_weights(ref.params, [o.copies[i] for o in outcomes])


def check_weights(
    expected: Mapping[str, Tensor], copies: Sequence[Sequence[tuple[str, Any, Any]]]
) -> None:
    for name, box, values in itertools.chain.from_iterable(copies):
        full = expected[name]
        here = box.inside(whole(tuple(full.shape)))
        found = {name: torch.from_numpy(values)}
        if kept(name):
            assert_kept(name, found[name], full)
        reference.assert_weights_close(found, {name: full[here]}, LR)


def assert_same_bits(one: Outcome, other: Outcome, name: str) -> None:
    """Assert that two outcomes of a rank, of one layout, are bitwise equal."""
    assert one.losses == other.losses, name
    assert one.norms == other.norms, name
    for mine, others in zip((*one.grads, *one.copies), (*other.grads, *other.copies), strict=True):
        for (tensor, box, values), (tensor_, box_, values_) in zip(mine, others, strict=True):
            assert (tensor, box) == (tensor_, box_)
            assert np.array_equal(values, values_), f"{name}: {tensor}"
