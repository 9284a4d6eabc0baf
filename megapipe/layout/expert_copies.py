"""Copies of experts on ranks that do not own them: what they need, and where their rows go."""

from __future__ import annotations

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.experts_config import OF_MAPS, ExpertsConfig
from megapipe.layout.speeds import Speeds
from megapipe.model.gpt.moe_checks import experts_in

MOST_PLACES = 2**15 - 1
"""Places for experts on all ranks of a group together, as choices are int16."""


def without_copies(experts: ExpertsConfig) -> ExpertsConfig:
    """The section where each rank has all experts."""
    fields = ExpertsConfig.model_fields
    return experts.model_copy(update={key: fields[key].default for key in OF_MAPS})


def check_copies(config: Config) -> None:
    """Refuse copies of experts where there is nothing to hold, or weights or gradients are not
    whole when copies need them; experts are split over several ranks."""
    experts, ep = config.experts, config.parallel.ep
    if not experts.moves:
        return
    where = f"experts.policy={experts.policy}"
    if ep == 1:
        raise ConfigError(
            f"{where} has nothing to hold with parallel.ep=1, where each rank has all experts: "
            "expected none, or 2 or more"
        )
    if not experts.slots:
        raise ConfigError(f"{where} has no room for copies: expected none, or experts.slots=1")
    _check_conditions(config, where)
    moe = config.model.moe
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
    """Refuse what copies do not go with."""
    if config.experts.dispatch == "fetch":
        raise ConfigError(
            f"{where} has nothing to hold with experts.dispatch=fetch, by which all ranks get all "
            "experts: expected none, or another dispatch"
        )
    if config.optimizer.zero == 3:
        raise ConfigError(
            f"{where} sends whole weights to copies, and optimizer.zero=3 keeps none: expected "
            "none, or zero of 2 at most"
        )
    if config.optimizer.post_validation:
        raise ConfigError(
            f"{where} chooses copies by the totals of a step, which "
            "optimizer.post_validation=true does not wait for: expected none, or false"
        )
    if config.lora.rank is not None:
        raise ConfigError(
            f"{where} is for experts that are trained, and lora.rank={config.lora.rank} leaves "
            "them as they are: expected none, or null"
        )
    if config.experts.policy == "shadow" and Speeds.of(config).tflops is None:
        raise ConfigError(
            f"{where} goes by the speed of the device, which is not known: set log.device (as in "
            "H100) or log.peak_tflops"
        )


def ranks_of_a_node(config: Config) -> int:
    """ep ranks of a node, where a group is of whole nodes; otherwise all."""
    ep, etp = config.parallel.ep, config.parallel.etp
    per_node = config.experts.node or config.parallel.per_node
    whole = per_node < ep * etp and ep * etp % per_node == 0 and per_node % etp == 0
    return per_node // etp if whole else ep
