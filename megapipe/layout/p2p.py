"""Speeds of links between processes, and how pipeline ranks send messages over them."""

from collections.abc import Sequence
from math import ceil

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.model.interface import TORCH_NAMES, ModelSpec
from megapipe.model.partition import StageSpec


def sends_tuples(config: Config, family: ModelSpec, stages: Sequence[StageSpec]) -> bool:
    """Whether a stage sends anything other than one tensor of the model's type."""
    train = config.train
    messages = (
        family.output_shape(s, train.microbatch, train.sequence_length) for s in stages[:-1]
    )
    own = TORCH_NAMES[family.dtype]
    return any(len(each) != 1 or each[0].dtype != own for each in messages)


def uses_scatter_gather(config: Config, tuples: bool) -> bool:
    """Whether each tensor-parallel rank sends a shard of the hidden states, and the receivers
    gather the shards (scatter-gather). Raises :class:`ConfigError` if that is impossible and
    ``scatter_gather=on``.

    At p bytes per second a message of M bytes takes M / p. With shards over t ranks it takes M / (t
    p), and the all-gather at g bytes per second M (t - 1) / (t g): together less if g > p.
    """
    parallel, chosen = config.parallel, config.pipeline.scatter_gather
    obstacle = _obstacle(config, tuples)
    if obstacle is not None and chosen == "on":
        raise ConfigError(f"pipeline.scatter_gather=on {obstacle}: expected auto")
    if obstacle is not None or chosen != "auto":
        return chosen == "on"
    return speed(config, parallel.tp) > speed(config, processes(config))


def _obstacle(config: Config, tuples: bool) -> str | None:
    """Say why hidden states cannot be sent in shards; None if they can."""
    parallel = config.parallel
    crosses = parallel.pp > 1 and config.pipeline.transport == "process_group"
    if not crosses or parallel.tp == 1 or parallel.sequence_parallel:
        return (
            "needs parallel.pp and parallel.tp above 1, parallel.sequence_parallel=false and "
            "pipeline.transport=process_group"
        )
    if tuples:
        return (
            "needs single tensors of model.dtype, but stages of "
            f"model.source={config.model.source} send tuples or other types"
        )
    return None


def speed(config: Config, span: int, members: int | None = None) -> float:
    """Return the GB/s of the slowest link within the groups of `members` ranks at equal distances;
    default: of all neighbours. `span`: number of ranks from a group's first to its last."""
    usual = link_speed(config, within=in_nodes(config, span))
    members = members or span
    stride = ceil(span / members)
    block = members * stride
    slow = [
        rate
        for (a, b), rate in _slow_links(config)
        if a // block == b // block and (a - b) % stride == 0
    ]
    return min([usual, *slow])


def speed_between(config: Config, first: int, second: int) -> float:
    """Return the GB/s of the slowest link between two pipeline ranks: each process sends to the
    process with the same index in the other rank."""
    per_node = config.parallel.ranks_per_node
    ends = list(zip(ranks_of_stage(config, first), ranks_of_stage(config, second), strict=True))
    usual = min(link_speed(config, within=a // per_node == b // per_node) for a, b in ends)
    slow = [rate for pair, rate in _slow_links(config) if pair in ends or pair[::-1] in ends]
    return min([usual, *slow])


def _slow_links(config: Config) -> list[tuple[tuple[int, int], float]]:
    """Return the pairs of processes of ``plan.links``, with their GB/s."""
    found, factor = [], config.plan.factors.link
    for name, rate in config.plan.links.items():
        first, _, second = name.partition("-")
        found.append(((int(first), int(second)), rate / factor))
    return found


def ranks_of_stage(config: Config, rank: int) -> range:
    """Return the processes of a pipeline rank."""
    parallel = config.parallel
    size = (parallel.dp or 1) * parallel.cp * parallel.tp
    first = 0 if config.pipeline.transport == "in_process" else rank * size
    return range(first, first + size)


def link_speed(config: Config, *, within: bool) -> float:
    """Return the GB/s from a process to others of its node (`within`), or to other nodes, with
    ``plan.factors.link``. `config` is resolved."""
    plan = config.plan
    assert plan.intra_node_gb_s is not None, "a resolved configuration"
    return (plan.intra_node_gb_s if within else plan.inter_node_gb_s) / plan.factors.link


def link_latency(config: Config) -> float:
    """Return the seconds of an empty message or collective, with ``plan.factors.link``."""
    return config.plan.link_latency_us * config.plan.factors.link / 1e6


def in_nodes(config: Config, neighbours: int) -> bool:
    """Whether every group of `neighbours` consecutive ranks is on one node."""
    per_node = config.parallel.ranks_per_node
    return processes(config) <= per_node or per_node % neighbours == 0


def processes(config: Config) -> int:
    """Return the number of processes of a job with one process per pipeline rank."""
    parallel = config.parallel
    return parallel.pp * (parallel.dp or 1) * parallel.cp * parallel.tp
