"""Small models whose training with stale weights has a closed form, in the real engine.

A stage has one weight w. It writes a multiple of w into a channel of its own, and adds a term in w
to one more channel. The loss is half the sum of the squares of the stages' channels, plus the last
channel. So the gradient of a square reads the forward's weights, and that of a term the backward's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.mesh import Grid
from megapipe.layout.resolve import resolve
from megapipe.schedule.async_schedules.load import load_async_schedule
from megapipe.testing import World


class Weight(nn.Module):
    """Channels [b, s, stages + 1] -> channels; the loss gets
    (stiffness + slack) / 2 x w^2 - slack / 2 x w^2 + slope x w."""

    own: Tensor
    last: Tensor

    def __init__(
        self, stage: int, stages: int, stiffness: float, slack: float, slope: float
    ) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.is_first = stage == 0
        self.slack, self.slope = slack, slope
        self.register_buffer("own", torch.zeros(stages + 1))
        self.register_buffer("last", torch.zeros(stages + 1))
        self.own[stage] = (stiffness + slack) ** 0.5
        self.last[stages] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.own.new_zeros(*x.shape, len(self.own))
        term = self.slope * self.w - self.slack / 2 * (self.w * self.w)
        return x + self.own * self.w + self.last * term


def weights(vocab_size: int, stiffness: str, slack: float, slope: float) -> list[nn.Module]:
    """Return the stages, each with its `stiffness`."""
    each = [*map(float, stiffness.split())]
    return [Weight(stage, len(each), value, slack, slope) for stage, value in enumerate(each)]


def loss(channels: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over samples of one position, []."""
    return channels[..., :-1].square().sum() / 2 + channels[..., -1].sum()


def train(
    world: World,
    policy: str,
    *,
    steps: int,
    lr: float,
    stiffness: Sequence[float],
    slack: float = 0.0,
    slope: float = 0.0,
    momentum: float = 0.0,
    decays: bool = False,
    anneal: int | None = None,
    microbatches: int = 1,
) -> tuple[list[float], list[list[float]]]:
    """Train with as many pipeline ranks in a process as `stiffness` has values. Return the losses,
    and each stage's weight after each step.

    `decays`: the learning rate falls to 0.
    """
    stages = len(stiffness)
    config = Config.model_validate(
        {
            "model": {
                "source": f"{__name__}:weights",
                "options": {
                    "stiffness": " ".join(map(repr, stiffness)),
                    "slack": slack,
                    "slope": slope,
                },
                "vocab_size": 2,
                "dtype": "fp64",
            },
            "parallel": {"pp": stages},
            "pipeline": {"transport": "in_process", "stage_layout": [1] * stages},
            "optimizer": {
                "rule": "sgd",
                "options": {"momentum": momentum, "nesterov": False},
                "weight_decay": 0.0,
                "lr": lr,
                **({"min_lr": 0.0} if decays else {}),
                "warmup_steps": 0,
                "schedule": "linear" if decays else "constant",
                "max_grad_norm": None,
            },
            "train": {
                "steps": steps,
                "sequence_length": 1,
                "global_batch": microbatches,
                "microbatch": 1,
                "loss_function": f"{__name__}:loss",
            },
        }
    )
    config, layout = resolve(config, 1, 2)
    if policy != "synchronous":  # refused for other modules; these let autograd keep the parameter
        pipeline = config.pipeline.model_copy(
            update={"weight_versions": policy, "lr_anneal_steps": anneal}
        )
        config = config.model_copy(update={"pipeline": pipeline})
        stream = load_async_schedule("1f1b", policy, ranks=stages, microbatches=microbatches)
        layout = replace(layout, async_schedule=stream)
    step = TrainStep(config, layout, world.mesh(Grid()))
    results, values = [], []
    for number in range(steps):
        results += step.train(number, _rows)
        values.append([own.values["model"].item() for own in step.optimizer.own_slices()])
    return [result.loss for result in (*results, *step.settle())], values


def _rows(samples: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    zeros = torch.zeros(len(samples), 1, dtype=torch.long)
    return zeros, zeros, torch.ones(len(samples), 1, dtype=torch.bool)
