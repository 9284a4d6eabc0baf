"""Experts that get copies, or other owners: what that needs, and the ranks of a node."""

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

MOST_PLACES = 2**15 - 1
"""Places for experts on all ranks of a group together, as choices are int16."""


def without_rebalance(experts: ExpertsConfig) -> ExpertsConfig:
    """The section where experts stay where they are."""
    fields = ExpertsConfig.model_fields
    keys = keys_with(ExpertsConfig, OF_MAPS)
    return experts.model_copy(update={key: fields[key].default for key in keys})


def check_rebalance(config: Config) -> None:
    """Refuse a policy that lacks what it goes by, and what it has no support for; experts are split
    over several ranks."""
    experts = config.experts
    if not experts.moves:
        return
    where = f"experts.policy={experts.policy}"
    _check_conditions(config, where)
    if experts.copies:
        _check_copies(config, where)
    else:
        _check_owners(config, where)


def _check_owners(config: Config, where: str) -> None:
    """Refuse experts that move without a pool, or where it would change the mathematics."""
    experts = config.experts
    if experts.pool is None:
        raise ConfigError(
            f"{where} takes owners from a pool, and there is none: expected none, or "
            "experts.pool=FILE.json, which experts.py plan -o makes of a log"
        )
    if experts.topology is not None:
        raise ConfigError(
            f"{where} changes how far experts are, by which experts.topology="
            f"{text_of(experts.topology)} balances: expected none, or null"
        )


def _check_copies(config: Config, where: str) -> None:
    """Refuse copies that there is no room for, or no number, or whose weights are not whole."""
    experts, ep, moe = config.experts, config.parallel.ep, config.model.moe
    if not experts.slots:
        raise ConfigError(f"{where} has no room for copies: expected none, or experts.slots=1")
    if config.optimizer.zero == 3:
        raise ConfigError(
            f"{where} sends whole weights to copies, and optimizer.zero=3 keeps none: expected "
            "none, or zero of 2 at most"
        )
    for layer in filter(moe.has_experts, range(config.model.layers)):
        others = moe.experts_of(layer) * (ep - 1) // ep
        if experts.slots > others:
            raise ConfigError(
                f"experts.slots={experts.slots} is more than the {others} experts that other ranks "
                f"have of {experts_in(moe, layer)} at parallel.ep={ep}: expected at most that"
            )
        if (places := moe.experts_of(layer) + ep * experts.slots) > MOST_PLACES:
            raise ConfigError(
                f"experts.slots={experts.slots} and {experts_in(moe, layer)} make {places:,} "
                f"places on parallel.ep={ep} ranks: expected at most {MOST_PLACES:,}"
            )


def _check_conditions(config: Config, where: str) -> None:
    """Refuse what no policy goes with."""
    if config.experts.dispatch == "fetch":
        raise ConfigError(
            f"{where} has nothing to hold with experts.dispatch=fetch, by which all ranks get all "
            "experts: expected none, or another dispatch"
        )
    if config.experts.pad:
        raise ConfigError(
            f"{where} evens out rows, of which experts.pad=true gives all experts as many: "
            "expected none, or false"
        )
    if config.optimizer.post_validation:
        raise ConfigError(
            f"{where} goes by the totals of a step, which "
            "optimizer.post_validation=true does not wait for: expected none, or false"
        )
    if config.lora.rank is not None:
        raise ConfigError(
            f"{where} is for experts that are trained, and lora.rank={config.lora.rank} leaves "
            "them as they are: expected none, or null"
        )
    if config.experts.policy != "balance" and Speeds.of(config).tflops is None:
        raise ConfigError(
            f"{where} goes by the speed of the device, which is not known: set {SPEED_KEYS}"
        )


def pools_of(config: Config, layout: Layout) -> Pools:
    """The owners that the layers of a run choose among. Raises :class:`ConfigError` for a file that
    cannot be read, or of another model or number of ranks."""
    assert config.experts.pool is not None
    begin = {n: ExpertMap.even(experts, layout.ep) for n, experts in layout.model.experts().items()}
    try:
        return read_pools(Path(config.experts.pool), begin)
    except ConfigError as error:
        raise ConfigError(f"experts.pool={error}") from None


def check_pool(config: Config, layout: Layout) -> None:
    """Read the pool of a run that takes one, for the errors of :func:`pools_of`."""
    if config.experts.pool is not None:
        pools_of(config, layout)


def ep_ranks_per_node(config: Config) -> int:
    """ep ranks of a node, where a group is of whole nodes; otherwise all."""
    ep, etp = config.parallel.ep, config.parallel.etp
    per_node = config.experts.node or config.parallel.per_node
    whole = per_node < ep * etp and ep * etp % per_node == 0 and per_node % etp == 0
    return per_node // etp if whole else ep
