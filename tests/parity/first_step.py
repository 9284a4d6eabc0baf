"""The first step of a run, in a world of tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from megapipe.cli import parse
from megapipe.data.tokenizer import load_tokenizer
from megapipe.distributed.mesh import Grid
from megapipe.launch.signals import StopRequest
from megapipe.layout.resolve import resolve
from megapipe.testing import World
from megapipe.train.trainer import Trainer

BATCH = 8


def first_losses(world: World, each: list[list[str]]) -> list[float]:
    """Return the losses of several runs' first steps."""
    return [first_loss(world, argv)[0] for argv in each]


def first_loss(world: World, argv: list[str]) -> tuple[float, list[np.ndarray[Any, Any]]]:
    """Return the loss of a run's first step, and tokens, labels and mask of its batch."""
    tokenizer = load_tokenizer("byte")
    config, layout = resolve(parse(argv).config, world.size, tokenizer.vocab_size)
    mesh = world.mesh(
        Grid(layout.pp, layout.dp, layout.cp, layout.tp, *layout.ep_sizes, layout.ranks_per_node)
    )
    with StopRequest() as stop:
        trainer = Trainer(config, layout, mesh, tokenizer, local_rank=world.rank, stop=stop)
    batch = trainer.training.rows(range(BATCH))
    results = trainer.train_step.train(0, trainer.training.rows) or trainer.train_step.settle()
    trainer.close()
    assert trainer.first_step == 0
    return results[0].loss, [tensor.numpy() for tensor in batch[:3]]
