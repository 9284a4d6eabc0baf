"""Update rules without torch: their options and declarations.

Checks and plans read the declarations; the rules themselves are in :mod:`megapipe.optim.rules`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationError

from megapipe.config.section import ExpectedText, OptionValue, Section
from megapipe.errors import ConfigError
from megapipe.util.user_code import UserCode

_STATE = re.compile(r"(?!model$)[A-Za-z]\w*", re.ASCII)
"""Pattern of the names that states may have. ``model`` is refused: it names the master weights."""

ARGUMENTS = ("config", "kernel")
"""Arguments that the constructor of an update rule may take."""


Decay = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[
    list[Decay],
    Field(min_length=2, max_length=2),
    ExpectedText("two numbers >= 0 and < 1, as in [0.9, 0.95]"),
]


class RuleOptions(Section):
    """Options of an update rule (``optimizer.options``). Rules without options use this class."""


class AdamOptions(RuleOptions):
    """Options of adamw, adam, lamb, adabelief and adam3."""

    betas: Betas = Field([0.9, 0.95])
    """Decay rates of the first and the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Constant added to the root of the second moment. adabelief and adam3 add it to the second
    moment at each step (adabelief also to the root), and 1e-16 is usual for them."""


class NAdamWOptions(AdamOptions):
    """Options of nadamw."""

    momentum_decay: float = Field(4e-3, ge=0)
    """Speed at which the decay rate of the momentum grows from betas[0] / 2 to betas[0]: in step t
    it is betas[0] x (1 - 0.96^(t x momentum_decay) / 2). 0: it stays at betas[0] / 2."""


class LionOptions(RuleOptions):
    """Options of lion."""

    betas: Betas = Field([0.9, 0.95])
    """Share of the momentum in a step's direction; decay rate of the momentum, usually 0.99."""


class MomentumOptions(RuleOptions):
    """Options of all rules with a momentum."""

    momentum: Decay = 0.9
    """Decay rate of the momentum; 0.95 is usual for muon."""


class SGDOptions(MomentumOptions):
    """Options of sgd."""

    nesterov: bool = True
    """Use Nesterov's momentum."""


class LARSOptions(MomentumOptions):
    """Options of lars."""

    trust_coefficient: float = Field(1e-3, gt=0)
    """Change of a matrix in a step at learning rate 1, as a fraction of its norm."""


class RMSpropOptions(MomentumOptions):
    """Options of rmsprop."""

    alpha: Decay = 0.95
    """Decay rate of the second moment; 0.99 is usual."""
    eps: float = Field(1e-8, gt=0)
    """Constant added to the root of the second moment."""


class MuonOptions(SGDOptions, AdamOptions):
    """Options of muon; `betas` and `eps` are for parameters that take adamw."""

    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the learning rate of a matrix [m, n]. match_rms_adamw: 0.2 sqrt(max(m, n)), which
    suits learning rates of adamw (Liu et al., 2502.16982). original: sqrt(max(1, m / n))."""
    split_qkv: Literal["projections", "heads", "none"] = "projections"
    """Parts of the matrix of queries, keys and values that are orthogonalized separately, each with
    its own factor. projections: queries, keys and values, as in checkpoints with q_proj, k_proj and
    v_proj; heads: each head of the three; none: the whole matrix. Gate and up of a gated MLP are
    always separate, adapters never split."""
    adamw_lr_scale: float = Field(1.0, gt=0)
    """Learning rate of parameters that take adamw, in multiples of `optimizer.lr`."""


@dataclass(frozen=True)
class Declaration:
    """Facts about an update rule for memory plans, checks and checkpoints.

    Raises :class:`ConfigError` if names of states are repeated or cannot be names in a checkpoint.
    """

    states: tuple[str, ...]
    """Names of the optimizer states: the values that are kept for each weight from step to step
    (torch's names for torch's rules). In checkpoints a state is ``optimizer.NAME``."""
    elementwise: bool
    """Whether a weight's update depends only on its own gradient and states."""
    takes_kernel: bool = False
    """Whether the kernel of ``kernels.only.optimizer`` computes the update, or part of it."""
    momentum: str = ""
    """Name of the state that exists only if the option ``momentum`` is above 0; empty if the rule
    has no such state."""
    has_direction: bool = False
    """Whether the rule has the method ``direction``, which ``optimizer.weight_prediction``
    needs."""
    name: str = ""
    """Value of ``optimizer.rule``; empty for a user-defined rule."""
    options: type[RuleOptions] = RuleOptions
    """Section whose fields are the rule's options."""

    def __post_init__(self) -> None:
        names = self.states
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"states={names!r} is not a tuple of names, as in ('exp_avg',)")
        wrong = [name for name in names if not _STATE.fullmatch(name)]
        if wrong or len(set(names)) < len(names):
            raise ConfigError(
                f"states={names!r}: expected different names of letters, digits and underscores, "
                "other than model"
            )
        if self.momentum and self.momentum not in names:
            raise ConfigError(f"momentum={self.momentum!r}: expected one of states={names!r}")

    def with_options(self, given: Mapping[str, OptionValue]) -> RuleOptions:
        """Return the rule's options, with defaults for options that are not `given`.

        Raises :class:`ConfigError` for unknown options and for wrong values.
        """
        try:
            return self.options.model_validate(given)
        except ValidationError as error:
            problem = error.errors()[0]
            name, has = ".".join(map(str, problem["loc"])), ", ".join(self.options.model_fields)
            raise ConfigError(
                f"optimizer.options.{name}: {problem['msg']}: {self.name or 'the rule'} has "
                f"{has or 'no options'}"
            ) from None

    def kept(self, options: RuleOptions) -> tuple[str, ...]:
        """Return the names of the states that `options` need: no momentum with decay rate 0."""
        if not isinstance(options, MomentumOptions) or options.momentum:
            return self.states
        return tuple(name for name in self.states if name != self.momentum)


class DeclaredRule:
    """Base class of update rules that needs no torch; see :class:`megapipe.optim.rules.Rule`."""

    declaration: ClassVar[Declaration]


_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTUM = ("momentum_buffer",)

ADAMW = Declaration(
    _MOMENTS,
    elementwise=True,
    takes_kernel=True,
    has_direction=True,
    name="adamw",
    options=AdamOptions,
)
ADAM = replace(ADAMW, name="adam")
SGD = Declaration(
    _MOMENTUM,
    elementwise=True,
    momentum="momentum_buffer",
    has_direction=True,
    name="sgd",
    options=SGDOptions,
)
LION = Declaration(
    ("exp_avg",), elementwise=True, has_direction=True, name="lion", options=LionOptions
)
MUON = Declaration(_MOMENTS, elementwise=False, takes_kernel=True, name="muon", options=MuonOptions)
LARS = Declaration(_MOMENTUM, elementwise=False, name="lars", options=LARSOptions)
LAMB = Declaration(_MOMENTS, elementwise=False, name="lamb", options=AdamOptions)
RMSPROP = Declaration(
    ("square_avg", "momentum_buffer"),
    elementwise=True,
    momentum="momentum_buffer",
    has_direction=True,
    name="rmsprop",
    options=RMSpropOptions,
)
NADAMW = Declaration(
    _MOMENTS, elementwise=True, has_direction=True, name="nadamw", options=NAdamWOptions
)
ADABELIEF = Declaration(
    ("exp_avg", "exp_avg_var"),
    elementwise=True,
    has_direction=True,
    name="adabelief",
    options=AdamOptions,
)
ADAM3 = Declaration(
    _MOMENTS, elementwise=True, has_direction=True, name="adam3", options=AdamOptions
)

RULES: Mapping[str, Declaration] = {
    rule.name: rule
    for rule in (ADAMW, ADAM, SGD, LION, MUON, LARS, LAMB, RMSPROP, NADAMW, ADABELIEF, ADAM3)
}
"""Declarations of the registered rules, by name."""


def declaration(rule: str) -> Declaration:
    """Return the declaration of `rule`, a value of ``optimizer.rule``. Raises ConfigError."""
    if rule in RULES:
        return RULES[rule]
    declared: Declaration = getattr(user_rule(rule).function, "declaration")  # noqa: B009
    return declared


def user_rule(spec: str) -> UserCode:
    """Return the user-defined update rule ``module:Name`` that `spec` names.

    Raises:
        ConfigError: the class cannot be imported, is not a complete rule, or declares nothing.
    """
    code = UserCode(spec, what="optimizer.rule=", error=ConfigError, kind="class")
    rule = code.function
    if not isinstance(rule, type) or not issubclass(rule, DeclaredRule):
        raise code.problem("it is not a class derived from megapipe.optim.rules.Rule")
    lacking = sorted(getattr(rule, "__abstractmethods__", ()))
    if lacking:
        raise code.problem(f"it has no method {lacking[0]!r}")
    if not isinstance(getattr(rule, "declaration", None), Declaration):
        raise code.problem(
            "it declares nothing; write declaration = Declaration(states=..., elementwise=...)"
        )
    code.check(ARGUMENTS)
    return code
