"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from megapipe.config.config import OptimizerConfig
from megapipe.layout.user_lr_schedule import UserLRSchedule


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0, in a run of `steps`.

    A user-defined schedule may raise :class:`~megapipe.errors.ConfigError`. In all other schedules,
    warm-up is linear, and the step after it has the peak. Decay ends at `min_lr`, by default in the
    run's last step. wsd (Hu et al., 2404.06395) holds the peak in between and decays linearly.
    """
    if config.is_user_schedule:
        return UserLRSchedule(config, steps).rate(step)
    warmup = config.warmup(steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.lr
    last = steps - 1
    if config.decay_steps is not None:
        length = config.decay_steps
    elif config.schedule == "wsd":
        length = max(1, steps // 10)
    else:
        length = max(1, last - warmup)
    start = last - length if config.schedule == "wsd" else warmup
    done = min(1.0, max(0.0, (step - start) / length))
    if config.schedule == "cosine":
        done = 0.5 * (1.0 - math.cos(math.pi * done))
    return config.lr + (config.min_lr - config.lr) * done
