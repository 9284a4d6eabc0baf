"""The layouts that a job may come to have when nodes are lost, checked when it starts."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.launch.endpoints import NodeRange
from megapipe.layout.measurements import Measurements
from megapipe.layout.others import ranks_per_replica, with_layout
from megapipe.layout.resolve import resolve
from megapipe.words import count_noun


def check_layouts(
    config: Config,
    world: int,
    *,
    where: str = "configuration",
    measure: Measurements | None = None,
) -> None:
    """Refuse one of ``parallel.layouts`` that cannot be had: each is resolved as if it were the
    layout of the job. `config` is as it was given, `world` the number of processes that there are.

    Limits of memory are checked where `measure` is given, as for :func:`resolve`.
    One that leaves dp open has several numbers of processes, and is refused if it can be had with
    none of them. Raises :class:`ConfigError`, in one line that begins with `where` and the layout.
    """
    for name in config.parallel.layouts:
        made = with_layout(config, name)
        alone = made.parallel.model_copy(update={"layouts": {}})
        made = made.model_copy(update={"parallel": alone})
        problem = None
        for processes in _numbers(made, world):
            try:
                named = f"{where}: parallel.layouts.{name}"
                resolve(made, processes, None, where=named, measure=_limited(made, measure))
                break
            except ConfigError as error:
                problem = problem or error
        else:
            assert problem is not None
            raise problem


def check_fewest(
    config: Config,
    nodes: NodeRange,
    ranks: int,
    *,
    where: str = "configuration",
    measure: Measurements | None = None,
) -> None:
    """Refuse a job that could not go on with the least of its `nodes`, of `ranks` processes each.
    Limits of memory are checked where `measure` is given, as for :func:`resolve`.

    `config` is as it was given. Raises :class:`ConfigError`, in one line that begins with `where`.
    """
    if not nodes.elastic:
        return
    try:
        resolve(config, nodes.least * ranks, None, measure=_limited(config, measure))
    except ConfigError as error:
        reason = str(error).removeprefix("configuration: ").partition(";")[0]
        raise ConfigError(
            f"{where}: --nnodes {nodes} lets the job go on with {count_noun(nodes.least, 'node')}, "
            f"for which there is no layout ({reason}): expected one of parallel.layouts for it, no "
            f"parallel.dp, or --nnodes {nodes.most}"
        ) from None


def _limited(config: Config, measure: Measurements | None) -> Measurements | None:
    """Measure only where a limit is to be checked."""
    return None if config.pipeline.memory_limit is None else measure


def _numbers(config: Config, world: int) -> Iterator[int]:
    """Numbers of processes that a layout can have, at least one: the largest up to `world` first,
    and then those above it."""
    dp, size, train = config.parallel.dp, ranks_per_replica(config), config.train
    if dp is not None:
        yield dp * size
        return
    rounds = max(1, train.global_batch // train.microbatch)
    fitting = [dp * size for dp in range(1, rounds + 1) if rounds % dp == 0]
    yield from sorted(fitting, key=lambda number: (number > world, abs(number - world)))
