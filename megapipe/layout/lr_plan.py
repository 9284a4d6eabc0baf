"""A learning-rate plan of the user's: ``optimizer.schedule=module:name``.

The function is given those of :data:`ARGUMENTS` that its signature takes, and returns the learning
rate of a step, warm-up included.
"""

import math
from numbers import Real

from megapipe.config.config import OptimizerConfig
from megapipe.errors import ConfigError
from megapipe.util.user_code import UserCode

ARGUMENTS = ("step", "steps", "lr", "min_lr", "warmup_steps", "decay_steps")
"""`step`, counted from 1 as in logs, of `steps`; the rest are the values of the optimizer's keys,
the warm-up in whole steps. A `decay_steps` of null is not given."""


class UserLRSchedule:
    """The plan of a run of `steps`, whose ``optimizer.schedule`` is code of the user's.

    Raises :class:`ConfigError` if it cannot be imported.
    """

    def __init__(self, config: OptimizerConfig, steps: int) -> None:
        self._config = config
        self._steps = steps
        self._code = UserCode(config.schedule, what="optimizer.schedule=", error=ConfigError)

    def takes(self, name: str) -> bool:
        """Whether the function has a parameter of this name."""
        return self._code.takes_all or name in self._code.parameters()

    def rate(self, step: int) -> float:
        """Learning rate of `step`, counted from 0.

        Raises :class:`ConfigError` for anything but a finite number of 0 or more.
        """
        config = self._config
        given = {
            "step": step + 1,
            "steps": self._steps,
            "lr": config.lr,
            "min_lr": config.min_lr,
            "warmup_steps": config.warmup(self._steps),
        }
        if config.decay_steps is not None:
            given["decay_steps"] = config.decay_steps
        rate = self._code.call(given, ARGUMENTS)
        number = isinstance(rate, Real) and not isinstance(rate, bool)
        if not number or not 0 <= float(rate) < math.inf:
            raise self._code.problem(
                f"it returned {rate!r} for step {step + 1} of {self._steps}: expected a finite "
                "number of 0 or more"
            )
        return float(rate)

    def check(self) -> None:
        """Raise :class:`ConfigError` for keys that the function does not take, and for a wrong rate
        at the first step, the one after the warm-up, one in the middle or the last."""
        config = self._config
        for name in ("min_lr", "warmup_steps", "decay_steps"):
            default = OptimizerConfig.model_fields[name].default
            if getattr(config, name) != default and not self.takes(name):
                raise self._code.problem(
                    f"it does not take {name}, so optimizer.{name}={getattr(config, name)} has no "
                    f"effect: expected {'null' if default is None else default}"
                )
        last = self._steps - 1
        for step in sorted({0, min(config.warmup(self._steps), last), last // 2, last}):
            self.rate(step)


def warms_up(config: OptimizerConfig, steps: int) -> bool:
    """Whether ``optimizer.warmup_steps`` has an effect."""
    return not config.own_schedule or UserLRSchedule(config, steps).takes("warmup_steps")
