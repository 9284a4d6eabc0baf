"""Arguments of a pipeline of user-defined modules, and checks that they fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.distributed.mesh import world_size
from megapipe.errors import ConfigError, LaunchError
from megapipe.schedule.ir import Schedule

Tensors = Tensor | tuple[Tensor, ...]
DEFAULT_RANKS = 2


def list_of_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return `modules` as a list; raise :class:`ConfigError` for anything else."""
    is_list = isinstance(modules, (list, tuple, nn.Sequential, nn.ModuleList))
    found = list(modules) if is_list else []
    if not found:
        what = f"{'an empty ' * is_list}{type(modules).__name__}"
        raise ConfigError(f"modules: {what}: expected a list of nn.Module")
    for number, module in enumerate(found):
        if not isinstance(module, nn.Module):
            raise ConfigError(f"modules[{number}] is a {type(module).__name__}, not an nn.Module")
    return found


def number_of_ranks(ranks: int | None, schedule: str | Schedule, *, distributed: bool) -> int:
    """Return the number of pipeline ranks: the size of the process group if `distributed`, else
    `ranks`. Without `ranks` it is the number in a Schedule object, or two for other schedules."""
    if distributed:
        world = world_size()
        if world is None:
            raise LaunchError(
                "distributed=True needs torch's default process group: call "
                "torch.distributed.init_process_group first, or megapipe.spawn"
            )
        if ranks not in (None, world):
            raise LaunchError(f"ranks={ranks} in a process group of {world}: expected the same")
        return world
    if ranks is None:
        return schedule.placement.ranks if isinstance(schedule, Schedule) else DEFAULT_RANKS
    return ranks


def fitting(schedule: Schedule, ranks: int, microbatches: int) -> Schedule:
    """Return `schedule`. Raise :class:`ConfigError` if it has another number of ranks or
    micro-batches, or if it cuts sequences into slices."""
    if schedule.slices > 1:
        raise ConfigError(
            f"schedule {schedule.name} cuts sequences into {schedule.slices} slices, which "
            "nn.Modules do not support: expected a schedule without slices"
        )
    sizes = {
        "ranks": (schedule.placement.ranks, ranks),
        "micro-batches": (schedule.whole_microbatches, microbatches),
    }
    for what, (found, wanted) in sizes.items():
        if found != wanted:
            raise ConfigError(
                f"schedule {schedule.name} has {found} {what}: expected {wanted}, as asked for"
            )
    return schedule


def tensors_of(
    batch: Sequence[Tensors], device: torch.device
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the inputs and the targets of a batch, each as a tuple of tensors on `device`."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise ConfigError("batch: expected (inputs, targets) or (tokens, labels, mask)")

    def flat(value: Any) -> tuple[Tensor, ...]:
        tensors = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        for each in tensors:
            if not isinstance(each, Tensor) or not each.dim():
                raise ConfigError(
                    f"batch: it has a {type(each).__name__}: expected tensors whose first "
                    "dimension counts samples"
                )
        return tuple(each.to(device) for each in tensors)

    return flat(batch[0]), tuple(each for part in batch[1:] for each in flat(part))


def cost_of(module: nn.Module) -> int:
    """Estimate the cost of a sample in a module: 1 plus its number of parameters. Parameters of
    embeddings do not count, since a sample uses few of them."""
    return 1 + sum(
        parameter.numel()
        for inner in module.modules()
        if not isinstance(inner, (nn.Embedding, nn.EmbeddingBag))
        for parameter in inner.parameters(recurse=False)
    )
