"""How fast processes reach each other, and what follows for messages between pipeline ranks."""

from collections.abc import Sequence

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.model.interface import TORCH_NAMES, ModelSpec
from megapipe.model.partition import StageSpec


def sends_tuples(config: Config, family: ModelSpec, stages: Sequence[StageSpec]) -> bool:
    """Whether stages send each other anything but one tensor of the model's type."""
    train = config.train
    messages = (
        family.output_shape(s, train.microbatch, train.sequence_length) for s in stages[:-1]
    )
    own = TORCH_NAMES[family.dtype]
    return any(len(each) != 1 or each[0].dtype != own for each in messages)


def uses_scatter_gather(config: Config, tuples: bool) -> bool:
    """Whether each tensor-parallel rank sends only its share of the hidden states that all of them
    have; `tuples` are sent whole. Raises :class:`ConfigError` if that is ``on`` and impossible.

    Sending M bytes takes M / p at the pipeline's p bytes per second. In shares of t ranks it takes
    M / (t p) + M (t - 1) / (t g), where the tensor-parallel gather runs at g: less, if g > p.
    """
    parallel, chosen = config.parallel, config.pipeline.scatter_gather
    obstacle = _obstacle(config, tuples)
    if obstacle is not None and chosen == "on":
        raise ConfigError(f"pipeline.scatter_gather=on {obstacle}: expected auto")
    if obstacle is not None or chosen != "auto":
        return chosen == "on"
    return speed(config, parallel.tp) > speed(config, processes(config))


def _obstacle(config: Config, tuples: bool) -> str | None:
    """Why there are no shares to send, if there are none."""
    parallel = config.parallel
    crosses = parallel.pp > 1 and config.pipeline.channels == "process_group"
    if not crosses or parallel.tp == 1 or parallel.sequence_parallel:
        return (
            "needs parallel.pp and parallel.tp above 1, parallel.sequence_parallel=false and "
            "pipeline.channels=process_group"
        )
    if tuples:
        return (
            "is for single tensors of model.dtype, and stages of model.source="
            f"{config.model.source} pass on tuples or other types"
        )
    return None


def speed(config: Config, neighbours: int) -> float:
    """GB/s of the slowest link in groups of `neighbours` neighbouring processes."""
    parallel = config.parallel
    return parallel.node_gb_s if in_nodes(config, neighbours) else parallel.network_gb_s


def in_nodes(config: Config, neighbours: int) -> bool:
    """Whether each group of so many neighbouring processes is on one node."""
    per_node = config.parallel.per_node
    return processes(config) <= per_node or per_node % neighbours == 0


def processes(config: Config) -> int:
    """Number of processes of the job where each pipeline rank is a process."""
    parallel = config.parallel
    return parallel.pp * (parallel.dp or 1) * parallel.cp * parallel.tp
