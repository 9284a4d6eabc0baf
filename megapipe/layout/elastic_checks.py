"""Checks at the start of a job whether it could continue if nodes were lost."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.launch.endpoints import NodeRange
from megapipe.layout.elastic_layouts import ranks_per_replica, with_layout
from megapipe.layout.measurements import Measurements
from megapipe.layout.resolve import resolve
from megapipe.text import count_noun


def check_layouts(
    config: Config,
    world: int,
    *,
    where: str = "configuration",
    measure: Measurements | None = None,
) -> None:
    """Resolve every layout of ``parallel.elastic_layouts``, and refuse one that is impossible.

    `config` is unresolved; `world`: current number of processes. `measure`: functions that measure
    stages; without them memory limits are not checked. A layout without dp allows several numbers
    of processes, and is refused if none of them works. Raises :class:`ConfigError`, in one line
    that begins with `where` and the layout.
    """
    for name in config.parallel.elastic_layouts:
        made = with_layout(config, name)
        alone = made.parallel.model_copy(update={"elastic_layouts": {}})
        made = made.model_copy(update={"parallel": alone})
        problem = None
        for processes in _numbers(made, world):
            try:
                named = f"{where}: parallel.elastic_layouts.{name}"
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
    """Refuse a job that cannot continue on the minimum of `nodes`, with `ranks` processes each.

    `config` is unresolved. `measure`: functions that measure stages; without them memory limits are
    not checked. Raises :class:`ConfigError`, in one line that begins with `where`.
    """
    if not nodes.elastic:
        return
    try:
        resolve(config, nodes.least * ranks, None, measure=_limited(config, measure))
    except ConfigError as error:
        reason = str(error).removeprefix("configuration: ").partition(";")[0]
        raise ConfigError(
            f"{where}: --nnodes {nodes} lets the job continue with "
            f"{count_noun(nodes.least, 'node')}, for which there is no layout ({reason}): add "
            "one to parallel.elastic_layouts, remove parallel.dp, or set --nnodes "
            f"{nodes.most}"
        ) from None


def _limited(config: Config, measure: Measurements | None) -> Measurements | None:
    """Return `measure` if ``pipeline.activation_limit``, which needs measurements, is set."""
    return None if config.pipeline.activation_limit is None else measure


def _numbers(config: Config, world: int) -> Iterator[int]:
    """Yield the numbers of processes that a layout allows, at least one: first those up to `world`
    in descending order, then larger ones in ascending order."""
    dp, size, train = config.parallel.dp, ranks_per_replica(config), config.train
    if dp is not None:
        yield dp * size
        return
    rounds = max(1, train.global_batch // train.microbatch)
    fitting = [dp * size for dp in range(1, rounds + 1) if rounds % dp == 0]
    yield from sorted(fitting, key=lambda number: (number > world, abs(number - world)))
