"""Chooses a job's layout by the number of its processes (``parallel.elastic_layouts``)."""

from __future__ import annotations

from typing import Any

from megapipe.config.config import Config
from megapipe.config.context import ContextConfig
from megapipe.config.experts import ExpertsConfig
from megapipe.errors import ConfigError
from megapipe.layout.moe.rebalance_checks import without_rebalance


def elastic_config(config: Config, world: int | None, named: str) -> Config:
    """Return `config` if its layout fits `world` processes. Otherwise return `config` with the
    first layout of ``parallel.elastic_layouts`` that fits. A `world` of None fits any layout.
    `named`: the number of processes as errors name it.

    Raises :class:`ConfigError` if no layout fits.
    """
    others = config.parallel.elastic_layouts
    if world is None or not others or _is_possible(config, world):
        return config
    for name in others:
        made = with_layout(config, name)
        if _is_possible(made, world):
            return made
    raise ConfigError(
        f"{named}: neither parallel.dp, cp, tp and pp nor any of "
        f"parallel.elastic_layouts ({', '.join(others)}) fits it with "
        f"train.global_batch={config.train.global_batch}"
    )


def with_layout(config: Config, name: str) -> Config:
    """Return the configuration with the layout `name` of ``parallel.elastic_layouts``."""
    return _changed(config, config.parallel.elastic_layouts[name].model_dump(exclude_none=True))


def ranks_per_replica(config: Config) -> int:
    """Return the number of processes of one data-parallel replica."""
    parallel = config.parallel
    pipeline = 1 if config.pipeline.transport == "in_process" else parallel.pp
    return pipeline * parallel.cp * parallel.tp


def _is_possible(config: Config, world: int) -> bool:
    dp, rest = divmod(world, ranks_per_replica(config))
    if rest or dp == 0 or config.parallel.dp not in (None, dp):
        return False
    return config.train.global_batch % (config.train.microbatch * dp) == 0


def _leaves_pool(config: Config, values: dict[str, Any]) -> bool:
    """Whether the layout with the given `values` has another ep than the one for which
    ``experts.rebalance_pool`` has maps."""
    ep = config.parallel.ep
    return config.experts.rebalance_pool is not None and values.get("ep", ep) != ep


def _changed(config: Config, values: dict[str, Any]) -> Config:
    if values.get("cp") == 1:
        config = config.model_copy(update={"context": ContextConfig()})
    parallel = config.parallel
    if values.get("ep", parallel.ep) * values.get("etp", parallel.etp) == 1:
        config = config.model_copy(update={"experts": ExpertsConfig()})
    elif values.get("ep", parallel.ep) == 1 or _leaves_pool(config, values):
        config = config.model_copy(update={"experts": without_rebalance(config.experts)})

    def section(name: str, *keys: str) -> Any:
        own = {key: values[key] for key in keys if key in values}
        return getattr(config, name).model_copy(update=own)

    return config.model_copy(
        update={
            "parallel": section("parallel", "dp", "cp", "tp", "pp", "ep", "etp"),
            "context": section("context", "ulysses"),
            "pipeline": section("pipeline", "chunks", "schedule"),
            "train": section("train", "microbatch"),
        }
    )
