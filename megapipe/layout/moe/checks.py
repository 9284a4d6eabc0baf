"""Refuses settings of MoE layers, and of the ranks over which experts are split, that do not work.
Each error says what would be right."""

from __future__ import annotations

from fractions import Fraction

from megapipe.config.config import Config
from megapipe.config.strict_yaml import text_of
from megapipe.errors import ConfigError
from megapipe.layers.moe.specs import most_imbalance
from megapipe.layout.moe.dispatch import check_dispatch
from megapipe.model.gpt.moe.checks import experts_in
from megapipe.model.gpt.moe.layers import routing_of
from megapipe.text import divisors_hint, nearest_multiples


def check_experts(config: Config, dp: int) -> None:
    """Refuse sizes that do not divide, and combinations of keys that MoE layers do not support."""
    _check_upcycle(config)
    _check_ranks(config, dp)
    check_dispatch(config)


def _check_ranks(config: Config, dp: int) -> None:
    moe, optimizer, parallel = config.model.moe, config.optimizer, config.parallel
    ep, etp, tp = parallel.ep, parallel.etp, parallel.tp
    block = dp * parallel.cp * tp
    if block % (ep * etp):
        inner = f" x parallel.etp={etp}" if etp > 1 else ""
        raise ConfigError(
            f"parallel.ep={ep}{inner} does not divide dp {dp} x cp {parallel.cp} x tp {tp} = "
            f"{block}: {divisors_hint('ep x etp' if etp > 1 else 'ep', block, ep * etp)}"
        )
    if moe.num_experts is None and ep == 1:
        return
    copies, size = block // (ep * etp), optimizer.shard_group_size
    if size is not None and copies % min(size, copies):
        raise ConfigError(
            f"optimizer.shard_group_size={size} does not divide the {copies} "
            f"expert-data-parallel ranks of parallel.ep={ep} x etp {etp}: "
            f"{divisors_hint('shard_group_size', copies, size)}"
        )
    if moe.num_experts is None:
        return
    assert moe.expert_ffn_hidden is not None, "resolved"
    if moe.expert_ffn_hidden % etp:
        raise ConfigError(
            f"model.moe.expert_ffn_hidden={moe.expert_ffn_hidden} is not divisible by "
            f"parallel.etp={etp}: {nearest_multiples(moe.expert_ffn_hidden, etp)}"
        )
    for layer in filter(moe.has_experts, range(config.model.layers)):
        experts = moe.experts_of(layer)
        if experts % ep:
            raise ConfigError(
                f"{experts_in(moe, layer)} is not divisible by parallel.ep={ep}: "
                f"{nearest_multiples(experts, ep)}"
            )
    if config.lora.rank is not None and moe.bias_update_rate:
        raise ConfigError(
            f"model.moe.bias_update_rate={moe.bias_update_rate:g} changes router biases, "
            f"which lora.rank={config.lora.rank} freezes: expected "
            "model.moe.bias_update_rate=0, or lora.rank=null"
        )
    if tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"model.moe.num_experts={text_of(moe.num_experts)} needs "
            f"parallel.sequence_parallel=true with parallel.tp={tp}"
        )


def _check_upcycle(config: Config) -> None:
    """Refuse to upcycle a dense model that lacks some of the MoE model's weights."""
    if not config.checkpoint.upcycle:
        return
    if config.lora.rank is not None:
        raise ConfigError(
            f"checkpoint.upcycle=true makes new routers, which lora.rank={config.lora.rank} "
            "freezes: expected checkpoint.upcycle=false, or lora.rank=null"
        )
    if config.model.moe.shared_ffn_hidden is not None:
        raise ConfigError(
            "checkpoint.upcycle=true: a dense model has no weights for "
            f"model.moe.shared_ffn_hidden={config.model.moe.shared_ffn_hidden}: expected null"
        )


def check_pieces(config: Config, *, slices: int, halves: bool) -> None:
    """Refuse settings that need uncut sequences or micro-batches if the schedule cuts them."""
    moe = config.model.moe
    if slices > 1 and moe.capacity_factor is not None and moe.drop_policy != "position":
        raise ConfigError(
            f"pipeline.schedule={config.pipeline.schedule} cuts sequences into slices: "
            f"model.moe.drop_policy={moe.drop_policy} needs all tokens of a sequence: "
            "expected position"
        )
    if (
        halves
        and moe.num_experts is not None
        and moe.aux_loss_coeff
        and moe.aux_loss_scope == "microbatch"
    ):
        raise ConfigError(
            f"pipeline.schedule={config.pipeline.schedule} cuts micro-batches into parts, "
            "which model.moe.aux_loss_scope=microbatch does not support: expected sequence or "
            "step"
        )


def why_as_many(config: Config) -> str | None:
    """Return the reason why ``--imbalance`` cannot change how many rows a rank's experts get; None
    if it can. `config` is resolved."""
    moe, parallel = config.model.moe, config.parallel
    if moe.num_experts is None:
        return "model.moe.num_experts=null"
    if moe.capacity_factor is not None:
        return f"model.moe.capacity_factor={moe.capacity_factor:g}, for which memory is planned"
    if parallel.ep == 1:
        return "parallel.ep=1, where each rank has all experts"
    if config.experts.dispatch == "fetch":
        return "experts.dispatch=fetch, where rows stay on their rank"
    return None


def check_imbalance(config: Config, imbalance: Fraction | None) -> None:
    """Refuse an `imbalance` (rows of a rank's experts relative to the mean) that is impossible."""
    if imbalance is None:
        return
    option, moe, ep = f"--imbalance {float(imbalance):g}", config.model.moe, config.parallel.ep
    if why := why_as_many(config):
        raise ConfigError(f"{option} has no effect with {why}: expected none")
    layers = filter(moe.has_experts, range(config.model.layers))
    most = max(most_imbalance(routing_of(moe, layer), ep) for layer in layers)
    if imbalance > most:
        raise ConfigError(
            f"{option}: with model.moe.top_k={moe.top_k} and parallel.ep={ep} no rank can get "
            f"more than {float(most):g} times the mean: expected at most that"
        )
