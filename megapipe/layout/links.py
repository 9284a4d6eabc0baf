"""How fast processes reach each other, and what follows for messages between pipeline ranks."""

from megapipe.config import Config


def scatters(config: Config) -> bool:
    """Whether tensor-parallel ranks send a share each of the hidden states that they all have.

    Sending M bytes takes M / p at the pipeline's p bytes per second; in shares of t ranks it takes
    M / (t p) + M (t - 1) / (t g), with g that of the tensor-parallel gather: less, if g > p.
    """
    parallel, chosen = config.parallel, config.pipeline.scatter_gather
    if chosen == "off" or not can_scatter(config):
        return False
    if chosen == "on":
        return True
    return speed(config, parallel.tp) > speed(config, processes(config))


def can_scatter(config: Config) -> bool:
    """Whether several tensor-parallel ranks send the same."""
    parallel = config.parallel
    crosses = parallel.pp > 1 and config.pipeline.channels == "process_group"
    return crosses and parallel.tp > 1 and not parallel.sequence_parallel


def speed(config: Config, neighbours: int) -> float:
    """GB/s within groups of so many neighbouring processes, by the slowest link."""
    parallel = config.parallel
    alone = processes(config) <= parallel.per_node
    within = alone or parallel.per_node % neighbours == 0
    return parallel.node_gb_s if within else parallel.network_gb_s


def processes(config: Config) -> int:
    """Of the job, where each pipeline rank is one."""
    parallel = config.parallel
    return parallel.pp * (parallel.dp or 1) * parallel.cp * parallel.tp
