"""A user-defined learning-rate schedule: ``optimizer.schedule=module:name``.

The function gets those arguments of :data:`ARGUMENTS` that are in its signature. It returns the
learning rate of a step, also during the warm-up.
"""

import math
from numbers import Real

from megapipe.config.config import OptimizerConfig
from megapipe.errors import ConfigError
from megapipe.util.user_code import UserCode

ARGUMENTS = ("step", "steps", "lr", "min_lr", "warmup_steps", "decay_steps")
"""Arguments that the function can take: `step`, counted from 1 as in logs; `steps` of the run; and
keys of the optimizer, the warm-up as a number of steps. `decay_steps` is not passed if null."""


class UserLRSchedule:
    """The user-defined learning-rate schedule of a run of `steps` steps.

    Raises :class:`ConfigError` if the function cannot be imported.
    """

    def __init__(self, config: OptimizerConfig, steps: int) -> None:
        self._config = config
        self._steps = steps
        self._code = UserCode(config.schedule, what="optimizer.schedule=", error=ConfigError)

    def takes(self, name: str) -> bool:
        """Whether the function takes the argument `name`."""
        return self._code.takes_all or name in self._code.parameters()

    def rate(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 0.

        Raises :class:`ConfigError` if the function returns no finite number of 0 or more.
        """
        config = self._config
        arguments = {
            "step": step + 1,
            "steps": self._steps,
            "lr": config.lr,
            "min_lr": config.min_lr,
            "warmup_steps": config.warmup(self._steps),
        }
        if config.decay_steps is not None:
            arguments["decay_steps"] = config.decay_steps
        rate = self._code.call(arguments, ARGUMENTS)
        number = isinstance(rate, Real) and not isinstance(rate, bool)
        if not number or not 0 <= float(rate) < math.inf:
            raise self._code.problem(
                f"it returned {rate!r} for step {step + 1} of {self._steps}: expected a finite "
                "number of 0 or more"
            )
        return float(rate)

    def check(self) -> None:
        """Raise :class:`ConfigError` for keys that the function does not take, or if it returns a
        wrong rate at the first step, the first after the warm-up, the middle one or the last."""
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
    """Whether ``optimizer.warmup_steps`` has an effect on a run of `steps` steps."""
    return not config.is_user_schedule or UserLRSchedule(config, steps).takes("warmup_steps")
