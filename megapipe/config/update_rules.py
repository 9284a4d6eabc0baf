"""Update rules as far as they are known without torch: what each declares of itself.

Checks and plans read the declarations; what a rule does is in :mod:`megapipe.optim.rules`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megapipe.errors import ConfigError
from megapipe.util.user_code import UserCode

_STATE = re.compile(r"(?!model$)[A-Za-z]\w*", re.ASCII)
"""Names of states; the master weights are called model."""

ARGUMENTS = ("config", "kernel")
"""Arguments that the constructor of a rule may take."""


@dataclass(frozen=True)
class Declaration:
    """The properties of an update rule on which memory, checks and checkpoints depend.

    Raises :class:`ConfigError` for states that cannot be told apart or saved.
    """

    states: tuple[str, ...]
    """Names of the values that are kept for each weight from step to step, torch's where torch has
    the rule; a checkpoint has them as ``optimizer.NAME``."""
    elementwise: bool
    """Whether a weight is updated from its own gradient and states alone, without communication."""
    takes_kernel: bool = False
    """Whether the kernel that ``kernels.optimizer`` chooses does the step, or part of it."""
    momentum: str = ""
    """Name of the state that is kept only where ``optimizer.momentum`` is above 0, if there is such
    a one."""
    has_direction: bool = False
    """Whether the rule has the method ``direction``, by which ``optimizer.look_ahead`` predicts."""
    name: str = ""
    """Value of ``optimizer.rule``; empty for a rule of the user's."""

    def __post_init__(self) -> None:
        names = self.states
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"states={names!r} is no tuple of names, as in ('exp_avg',)")
        wrong = [name for name in names if not _STATE.fullmatch(name)]
        if wrong or len(set(names)) < len(names):
            raise ConfigError(
                f"states={names!r}: expected different names of letters, digits and underscores, "
                "other than model"
            )
        if self.momentum and self.momentum not in names:
            raise ConfigError(f"momentum={self.momentum!r}: expected one of states={names!r}")

    def kept(self, momentum: float) -> tuple[str, ...]:
        """The states that a run with this ``optimizer.momentum`` keeps."""
        return tuple(name for name in self.states if momentum or name != self.momentum)


class DeclaredRule:
    """Base of all update rules, :class:`megapipe.optim.rules.Rule`, without what takes torch."""

    declaration: ClassVar[Declaration]


_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTUM = ("momentum_buffer",)

ADAMW = Declaration(_MOMENTS, elementwise=True, takes_kernel=True, has_direction=True, name="adamw")
ADAM = Declaration(_MOMENTS, elementwise=True, takes_kernel=True, has_direction=True, name="adam")
SGD = Declaration(
    _MOMENTUM, elementwise=True, momentum="momentum_buffer", has_direction=True, name="sgd"
)
LION = Declaration(("exp_avg",), elementwise=True, has_direction=True, name="lion")
MUON = Declaration(_MOMENTS, elementwise=False, takes_kernel=True, name="muon")
LARS = Declaration(_MOMENTUM, elementwise=False, name="lars")
LAMB = Declaration(_MOMENTS, elementwise=False, name="lamb")
RMSPROP = Declaration(
    ("square_avg", "momentum_buffer"),
    elementwise=True,
    momentum="momentum_buffer",
    has_direction=True,
    name="rmsprop",
)
NADAMW = Declaration(_MOMENTS, elementwise=True, has_direction=True, name="nadamw")
ADABELIEF = Declaration(
    ("exp_avg", "exp_avg_var"), elementwise=True, has_direction=True, name="adabelief"
)
ADAM3 = Declaration(_MOMENTS, elementwise=True, has_direction=True, name="adam3")

RULES: Mapping[str, Declaration] = {
    rule.name: rule
    for rule in (ADAMW, ADAM, SGD, LION, MUON, LARS, LAMB, RMSPROP, NADAMW, ADABELIEF, ADAM3)
}
"""The registered rules, by name."""


def declaration(rule: str) -> Declaration:
    """The declaration of `rule`, a value of ``optimizer.rule``. Raises :class:`ConfigError`."""
    if rule in RULES:
        return RULES[rule]
    declared: Declaration = getattr(user_rule(rule).function, "declaration")  # noqa: B009
    return declared


def user_rule(spec: str) -> UserCode:
    """The class of the user's that `spec` names, which is an update rule.

    Raises:
        ConfigError: it cannot be imported, is no complete rule, or declares nothing.
    """
    code = UserCode(spec, what="optimizer.rule=", error=ConfigError, kind="class")
    rule = code.function
    if not isinstance(rule, type) or not issubclass(rule, DeclaredRule):
        raise code.problem("it is no class that is derived from megapipe.optim.rules.Rule")
    lacking = sorted(getattr(rule, "__abstractmethods__", ()))
    if lacking:
        raise code.problem(f"it has no method {lacking[0]!r}")
    if not isinstance(getattr(rule, "declaration", None), Declaration):
        raise code.problem(
            "it declares nothing; write declaration = Declaration(states=..., elementwise=...)"
        )
    code.check(ARGUMENTS)
    return code
