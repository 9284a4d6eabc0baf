"""Checks of ``experts.rebalance``: expert replicas, and experts that change owners."""

from __future__ import annotations

from pathlib import Path

from megapipe.config.config import Config
from megapipe.config.experts import OF_MAPS, ExpertsConfig
from megapipe.config.section import keys_with
from megapipe.config.strict_yaml import text_of
from megapipe.errors import ConfigError
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool_file import Pools, read_pools
from megapipe.layout.layout import Layout
from megapipe.layout.speeds import SPEED_KEYS, Speeds
from megapipe.model.gpt.moe.checks import experts_in

MAX_SLOTS = 2**15 - 1
"""Maximum number of expert slots on all ranks of an ep group: slot numbers are int16."""


def without_rebalance(experts: ExpertsConfig) -> ExpertsConfig:
    """Return the section `experts` with rebalancing off: experts stay on their ranks."""
    fields = ExpertsConfig.model_fields
    keys = keys_with(ExpertsConfig, OF_MAPS)
    return experts.model_copy(update={key: fields[key].default for key in keys})


def check_rebalance(config: Config) -> None:
    """Refuse a policy that lacks what it needs, or conflicts with other keys. Experts must be split
    over several ranks."""
    experts = config.experts
    if not experts.moves:
        return
    setting = f"experts.rebalance={experts.rebalance}"
    _check_conditions(config, setting)
    if experts.copies:
        _check_copies(config, setting)
    else:
        _check_owners(config, setting)


def _check_owners(config: Config, setting: str) -> None:
    """Refuse experts that change owners without a pool, or if results depend on the owner."""
    experts = config.experts
    if experts.rebalance_pool is None:
        raise ConfigError(
            f"{setting} needs a pool of maps: expected experts.rebalance=none, or "
            "experts.rebalance_pool=FILE.json, which megapipe experts rebalance -o writes "
            "from a log"
        )
    if experts.link_bandwidths is not None:
        raise ConfigError(
            f"{setting} moves experts, but "
            f"experts.link_bandwidths={text_of(experts.link_bandwidths)} weights the "
            "auxiliary loss by where they are: expected experts.rebalance=none, or "
            "experts.link_bandwidths=null"
        )


def _check_copies(config: Config, setting: str) -> None:
    """Refuse expert replicas without slots, with too many slots, or with ZeRO-3."""
    experts, ep, moe = config.experts, config.parallel.ep, config.model.moe
    if not experts.replica_slots:
        raise ConfigError(
            f"{setting} has no slots for replicas: expected experts.rebalance=none, or "
            "experts.replica_slots=1"
        )
    if config.optimizer.zero == 3:
        raise ConfigError(
            f"{setting} sends whole weights to replicas, but optimizer.zero=3 keeps only "
            "shards: expected experts.rebalance=none, or optimizer.zero of at most 2"
        )
    for layer in filter(moe.has_experts, range(config.model.layers)):
        others = moe.experts_of(layer) * (ep - 1) // ep
        if experts.replica_slots > others:
            raise ConfigError(
                f"experts.replica_slots={experts.replica_slots} is more than the {others} "
                f"experts that other ranks have with {experts_in(moe, layer)} and "
                f"parallel.ep={ep}: expected at most that"
            )
        if (num_slots := moe.experts_of(layer) + ep * experts.replica_slots) > MAX_SLOTS:
            raise ConfigError(
                f"experts.replica_slots={experts.replica_slots} and {experts_in(moe, layer)} "
                f"make {num_slots:,} slots on parallel.ep={ep} ranks: expected at most "
                f"{MAX_SLOTS:,}"
            )


def _check_conditions(config: Config, setting: str) -> None:
    """Refuse settings that conflict with every rebalancing policy."""
    if config.experts.dispatch == "fetch":
        raise ConfigError(
            f"{setting} has no effect with experts.dispatch=fetch, with which all ranks get all "
            "experts: expected experts.rebalance=none, or another experts.dispatch"
        )
    if config.experts.pad_to_capacity:
        raise ConfigError(
            f"{setting} balances rows, but experts.pad_to_capacity=true pads every expert to "
            "the same number: expected experts.rebalance=none, or "
            "experts.pad_to_capacity=false"
        )
    if config.optimizer.post_validation:
        raise ConfigError(
            f"{setting} needs the totals of a step, but optimizer.post_validation=true does not "
            "wait for them: expected experts.rebalance=none, or "
            "optimizer.post_validation=false"
        )
    if config.lora.rank is not None:
        raise ConfigError(
            f"{setting} needs trained experts, but lora.rank={config.lora.rank} freezes them: "
            "expected experts.rebalance=none, or lora.rank=null"
        )
    if config.experts.rebalance != "balance" and Speeds.of(config).tflops is None:
        raise ConfigError(
            f"{setting} needs the speed of the device, which is not known: set {SPEED_KEYS}"
        )


def pools_of(config: Config, layout: Layout) -> Pools:
    """Read, for each MoE layer, the pool of expert maps that rebalancing chooses from. Raises
    :class:`ConfigError` if the file cannot be read, or is for another model or number of ranks."""
    assert config.experts.rebalance_pool is not None
    begin = {n: ExpertMap.even(experts, layout.ep) for n, experts in layout.model.experts().items()}
    try:
        return read_pools(Path(config.experts.rebalance_pool), begin)
    except ConfigError as error:
        raise ConfigError(f"experts.rebalance_pool={error}") from None


def check_pool(config: Config, layout: Layout) -> None:
    """Raise :class:`ConfigError` if ``experts.rebalance_pool`` is set and the file cannot be read,
    or is for another model or number of ranks."""
    if config.experts.rebalance_pool is not None:
        pools_of(config, layout)


def ep_ranks_per_node(config: Config) -> int:
    """Return the number of ep ranks per node. It is the whole group if the group is on one node, or
    if nodes do not divide it evenly."""
    ep, etp = config.parallel.ep, config.parallel.etp
    per_node = config.experts.ranks_per_node or config.parallel.ranks_per_node
    whole = per_node < ep * etp and ep * etp % per_node == 0 and per_node % etp == 0
    return per_node // etp if whole else ep
