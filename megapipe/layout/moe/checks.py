"""Checks of layers with experts and their ranks; an error says in one line what would be right."""

from __future__ import annotations

from fractions import Fraction

from megapipe.config.config import Config
from megapipe.config.strict_yaml import text_of
from megapipe.errors import ConfigError
from megapipe.layers.moe.specs import most_imbalance
from megapipe.layout.moe.dispatch import check_dispatch
from megapipe.model.gpt.moe.checks import experts_in
from megapipe.model.gpt.moe.layers import routing_of
from megapipe.words import divisors_hint, nearest_multiples


def check_experts(config: Config, dp: int) -> None:
    """Refuse sizes that do not divide, and what layers with experts do not have yet, beside what
    their family lacks."""
    _check_upcycle(config)
    _check_ranks(config, dp)
    check_dispatch(config)


def _check_ranks(config: Config, dp: int) -> None:
    moe, optimizer, parallel = config.model.moe, config.optimizer, config.parallel
    ep, etp, tp = parallel.ep, parallel.etp, parallel.tp
    if moe.experts is None:
        return
    block = dp * parallel.cp * tp
    if block % (ep * etp):
        inner = f" x parallel.etp={etp}" if etp > 1 else ""
        raise ConfigError(
            f"parallel.ep={ep}{inner} does not divide dp {dp} x cp {parallel.cp} x tp {tp} = "
            f"{block}: {divisors_hint('ep x etp' if etp > 1 else 'ep', block, ep * etp)}"
        )
    assert moe.ffn is not None, "resolved"
    if moe.ffn % etp:
        raise ConfigError(
            f"model.moe.ffn={moe.ffn} is not divisible by parallel.etp={etp}: "
            f"{nearest_multiples(moe.ffn, etp)}"
        )
    for layer in filter(moe.has_experts, range(config.model.layers)):
        experts = moe.experts_of(layer)
        if experts % ep:
            raise ConfigError(
                f"{experts_in(moe, layer)} is not divisible by parallel.ep={ep}: "
                f"{nearest_multiples(experts, ep)}"
            )
    copies, size = block // (ep * etp), optimizer.shard_size
    if size is not None and copies % min(size, copies):
        raise ConfigError(
            f"optimizer.shard_size={size} does not divide the {copies} copies of experts that "
            f"parallel.ep={ep} x etp {etp} leaves: {divisors_hint('shard_size', copies, size)}"
        )
    if config.lora.rank is not None and moe.bias_rate:
        raise ConfigError(
            f"model.moe.bias_rate={moe.bias_rate:g} moves biases of routers, which "
            f"lora.rank={config.lora.rank} leaves as they are: expected 0, or null"
        )
    if tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"model.moe.experts={text_of(moe.experts)} needs parallel.sequence_parallel=true "
            f"with parallel.tp={tp}"
        )


def _check_upcycle(config: Config) -> None:
    """Refuse to begin with a dense model what it has nothing for."""
    if not config.checkpoint.upcycle:
        return
    if config.lora.rank is not None:
        raise ConfigError(
            "checkpoint.upcycle=true begins with new routers, which lora.rank="
            f"{config.lora.rank} leaves as they are: expected false, or lora.rank=null"
        )
    if config.model.moe.shared is not None:
        raise ConfigError(
            f"checkpoint.upcycle=true: a dense model has no weights for model.moe.shared="
            f"{config.model.moe.shared}: expected null"
        )


def check_pieces(config: Config, *, slices: int, halves: bool) -> None:
    """Refuse what needs whole sequences, or whole micro-batches, where the schedule cuts them."""
    moe = config.model.moe
    if slices > 1 and moe.capacity is not None and moe.drop != "position":
        raise ConfigError(
            f"pipeline.schedule={config.pipeline.schedule} cuts sequences into slices: "
            f"model.moe.drop={moe.drop} goes by all tokens of a sequence; expected position"
        )
    if halves and moe.experts is not None and moe.balance and moe.balance_scope == "microbatch":
        raise ConfigError(
            f"pipeline.schedule={config.pipeline.schedule} cuts micro-batches into parts: "
            "model.moe.balance_scope=microbatch has no support for it; expected sequence or step"
        )


def why_as_many(config: Config) -> str | None:
    """Why a plan knows without an imbalance how many rows the experts of a rank get at most, of a
    resolved configuration; None where they may be more or less."""
    moe, parallel = config.model.moe, config.parallel
    if moe.experts is None:
        return "model.moe.experts=null, without which there are none"
    if moe.capacity is not None:
        return f"model.moe.capacity={moe.capacity:g}, for which memory is planned"
    if parallel.ep == 1:
        return "parallel.ep=1, where each rank has all experts"
    if config.experts.dispatch == "fetch":
        return "experts.dispatch=fetch, where rows stay on their rank"
    return None


def check_imbalance(config: Config, imbalance: Fraction | None) -> None:
    """Refuse to plan for a rank with so many times the mean rows where no rank can have them."""
    if imbalance is None:
        return
    where, moe, ep = f"--imbalance {float(imbalance):g}", config.model.moe, config.parallel.ep
    if why := why_as_many(config):
        raise ConfigError(f"{where} has no effect with {why}: expected none")
    layers = filter(moe.has_experts, range(config.model.layers))
    most = max(most_imbalance(routing_of(moe, layer), ep) for layer in layers)
    if imbalance > most:
        raise ConfigError(
            f"{where}: of model.moe.top_k={moe.top_k} choices of a token a rank gets at most "
            f"{float(most):g} times the mean at parallel.ep={ep}: expected at most that"
        )
