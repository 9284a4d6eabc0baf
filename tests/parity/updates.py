"""One update of all weights and states, compared with the plain rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tests.parity import plain_rules, reference
from tests.parity.cases import Case, settings
from tests.parity.compare import assert_within
from tests.parity.expected import ROUNDING
from tests.parity.reference import Params

Values = dict[str, Params]
"""Whole tensors, fp64: master weights ("model") and states ("optimizer.exp_avg", ...)."""
STEP_ERROR = {"fp64": 1e-10, "fp32": 64 * ROUNDING["fp32"]}
"""Relative error of a step; a rule rounds 10 to 20 times, and adds terms that cancel in part."""
TINY = 2.0**-126
"""Size below which fp32 and bf16 have fewer digits."""


def states_of(values: Values, name: str) -> Params:
    """Return the states of one parameter, by the names of its rule."""
    return {
        kind.removeprefix("optimizer."): values[kind][name] for kind in values if kind != "model"
    }


def rounds(case: Case, values: Values) -> bool:
    """Whether anything is kept in bf16 that is updated in fp32 and compared per element. Muon's
    matrices, which all adapters are, are not."""
    elementwise = not (case.rule == "muon" and case.lora is not None)
    master = case.master == "none" and elementwise
    return master or (case.state_dtype == "bf16" and len(values) > 1)


@dataclass
class Update:
    """A step with gradients of this norm, after `count` others."""

    case: Case
    before: Values
    grads: Params
    norm: float
    lr: float
    count: int

    @cached_property
    def main(self) -> str:
        """Type in which updates are computed."""
        return "fp64" if self.case.dtype == "fp64" else "fp32"

    @cached_property
    def config(self) -> Any:
        return settings(self.case).optimizer

    @property
    def options(self) -> Any:
        """Options of the rule."""
        return self.config.rule_options

    def check(self, after: Values) -> int:
        """Check that weights and states are what the plain rule computes from those before.

        Return how many were rounded to the farther of their two neighbours in bf16.
        """
        exact = self.stepped(plain_rules.by_singular_values)
        weights = {name: weight for name, (weight, _) in exact.items()}
        allowed = {name: self.error_of_weight(name, weight) for name, weight in weights.items()}
        products = [n for n in weights if self.by_products(n)]
        if products:
            self.check_products(after["model"], weights, allowed, products)
        others = [name for name in weights if name not in products]
        farther = self.check_kind(
            "weight",
            after["model"],
            {name: weights[name] for name in others},
            {name: allowed[name] for name in others},
            narrow=self.case.master == "none",
        )
        for kind in sorted(after.keys() - {"model"}):
            before, state = self.before[kind], kind.removeprefix("optimizer.")
            states = {name: made.get(state, before[name]) for name, (_, made) in exact.items()}
            allowed = {name: self.error_of_state(before[name], s) for name, s in states.items()}
            if state == "momentum_buffer" and self.case.rule == "rmsprop":
                allowed = {name: error + self.cancelled(name) for name, error in allowed.items()}
            narrow = self.case.state_dtype == "bf16"
            farther += self.check_kind(kind, after[kind], states, allowed, narrow=narrow)
        return farther

    def by_products(self, name: str) -> bool:
        """Whether a weight's step goes through Newton-Schulz in bf16."""
        muon = self.case.rule == "muon" and plain_rules.is_hidden(name)
        return muon and self.main == "fp32"

    @property
    def factor(self) -> float:
        """Factor of clipping."""
        clip = self.case.clip
        return 1.0 if clip is None else min(1.0, clip / (self.norm + 1e-6))

    def stepped(self, orthogonalise: Any) -> dict[str, plain_rules.Stepped]:
        """Return all weights and their states after the plain rule's step, in fp64."""
        return {
            name: plain_rules.step(
                self.config,
                name,
                weight,
                self.factor * self.grads[name],
                states_of(self.before, name),
                self.lr,
                self.count,
                orthogonalise,
                model=settings(self.case).model,
            )
            for name, weight in self.before["model"].items()
        }

    def check_kind(
        self, what: str, found: Params, exact: Params, errors: Params, *, narrow: bool
    ) -> int:
        """Compare per element; return the number of values at the farther of two neighbours."""
        found = {name: found[name] for name in exact}
        if not narrow:
            assert_within(what, found, exact, errors)
            return 0
        share = 0.5 if self.case.rounding == "nearest" else 1.0
        spacings = {name: spacing(exact[name].abs() + errors[name]) for name in exact}
        allowed = {name: errors[name] + share * spacings[name] for name in exact}
        assert_within(what, found, exact, allowed)
        for name, values in found.items():
            assert values.equal(values.bfloat16().double()), f"{what} {name} is not bf16"
        return sum(
            int(((found[n] - exact[n]).abs() > errors[n] + 0.5 * spacings[n]).sum()) for n in exact
        )

    def check_products(
        self, found: Params, exact: Params, errors: Params, names: Sequence[str]
    ) -> None:
        """Compare steps of Newton-Schulz in bf16: at most twice as far from the exact step as a
        plain one."""
        before = self.before["model"]
        rounded = self.stepped(plain_rules.by_products)
        if self.case.master == "none":
            errors = {n: errors[n] + spacing(exact[n].abs() + errors[n]) for n in names}
        reference.assert_error_like(
            {n: found[n] - before[n] for n in names},
            {n: rounded[n][0] - before[n] for n in names},
            {n: exact[n] - before[n] for n in names},
            slack={n: errors[n] for n in names},
        )

    def error_of_weight(self, name: str, exact: Tensor) -> Tensor:
        """Return the largest sum of the rounding errors of a weight and of its step."""
        weight, unit = self.before["model"][name], ROUNDING[self.main]
        step = (exact - weight).abs().max()
        error = 8 * unit * torch.maximum(weight.abs(), exact.abs()) + STEP_ERROR[self.main] * step
        if self.case.rule == "lion":
            # the sign of what cancels to rounding may be any
            momentum, grad = self.before["optimizer.exp_avg"][name], self.grads[name]
            total = plain_rules.lion_direction(self.options, grad, {"exp_avg": momentum})
            unsure = total.abs() <= 8 * unit * (momentum.abs() + grad.abs())
            error = error + 2 * self.lr * unsure
        return error + self.lr * self.cancelled(name)

    def cancelled(self, name: str) -> Tensor | float:
        """Return the error of a direction if gradient and weight decay, which are added, cancel in
        part, and the rest is scaled up."""
        rule, states = self.case.rule, states_of(self.before, name)
        if rule not in ("adam", "rmsprop") or not plain_rules.is_matrix(name):
            return 0.0
        grad = self.factor * self.grads[name]
        decay = self.config.weight_decay * self.before["model"][name]
        terms = 12 * ROUNDING[self.main] * (grad.abs() + decay.abs())
        if rule == "adam":
            _, second = plain_rules.moments(self.options, grad + decay, states)
            terms = (1 - self.options.betas[0]) * terms
            return plain_rules.adams_direction(self.options, terms, second, self.count)
        _, made = plain_rules.rmsprop(self.options, grad, grad + decay, states, self.lr)
        return terms / (made["square_avg"].sqrt() + self.options.eps)

    def error_of_state(self, before: Tensor, exact: Tensor) -> Tensor:
        """Return the largest rounding error of a state, whose terms may cancel."""
        largest = torch.maximum(before.abs(), exact.abs()).max().item()
        return torch.full_like(exact, STEP_ERROR[self.main] * largest + TINY)


def spacing(values: Tensor) -> Tensor:
    """Return the distance between neighbouring values in bf16."""
    return torch.exp2(torch.floor(torch.log2(values.clamp(min=TINY))) - 7)
