"""How tokens get to their experts: the section `experts`, resolved and checked."""

from __future__ import annotations

from megapipe.config.config import Config
from megapipe.config.experts import ExpertsConfig
from megapipe.config.strict_yaml import text_of
from megapipe.errors import ConfigError
from megapipe.layout.moe.replicas import check_rebalance
from megapipe.layout.speeds import SPEED_KEYS, Speeds
from megapipe.model.gpt.moe.checks import experts_in
from megapipe.util.user_code import is_user_code
from megapipe.words import join_or

MOST_CHUNKS = 8
BY_BYTES = ("all_to_all", "all_gather", "fetch")
"""Forms of which dispatch=auto takes one, the first where they are equal; without a codec."""


def on_nodes(config: Config, ranks: int) -> Config:
    """The configuration where a launcher has started so many ranks on each node."""
    experts = config.experts
    if experts.dispatch != "hierarchical" or experts.node is not None:
        return config
    return config.model_copy(update={"experts": experts.model_copy(update={"node": ranks})})


def resolved_experts(config: Config) -> ExpertsConfig:
    """Fill in the ranks of a node where these matter, and a form for `auto` where no experts
    travel; the model is resolved."""
    experts, parallel = config.experts, config.parallel
    if experts.dispatch == "hierarchical" and experts.node is None:
        experts = experts.model_copy(update={"node": parallel.per_node})
    if config.model.moe.experts is not None and parallel.ep * parallel.etp > 1:
        return experts
    dispatch = BY_BYTES[0] if experts.dispatch == "auto" else experts.dispatch
    return experts.model_copy(update={"dispatch": dispatch, "chunks": experts.number_of_chunks})


def dispatch_candidates(config: Config) -> tuple[str, ...]:
    """Those that dispatch=auto takes one of; with a codec or a policy rows have to travel."""
    travel = config.experts.codec != "none" or config.experts.moves
    return tuple(form for form in BY_BYTES if form != "fetch" or not travel)


def most_chunks(config: Config) -> int:
    """Into so many chunks the experts of a rank can be cut, in every layer that has some."""
    moe = config.model.moe
    layers = filter(moe.has_experts, range(config.model.layers))
    return min(MOST_CHUNKS, *(moe.experts_of(layer) // config.parallel.ep for layer in layers))


def check_dispatch(config: Config) -> None:
    """Refuse numbers that do not divide, and what does not go together; experts and their ranks are
    checked already."""
    experts, moe = config.experts, config.model.moe
    ep, etp = config.parallel.ep, config.parallel.etp
    if moe.experts is None or ep * etp == 1:
        return
    if is_user_code(experts.dispatch):
        from megapipe.layers.moe.dispatchers import load_dispatcher  # loads torch

        load_dispatcher(experts.dispatch)
    _check_codec(config)
    _check_topology(config)
    check_rebalance(config)
    for layer in filter(moe.has_experts, range(config.model.layers)):
        here = moe.experts_of(layer) // ep
        if experts.number_of_chunks > here:
            raise ConfigError(
                f"experts.chunks={experts.chunks} is more than the {here} experts that a rank has "
                f"of {experts_in(moe, layer)} at parallel.ep={ep}: expected at most that"
            )
    if experts.dispatch == "hierarchical":
        _check_node(experts.node or 1, ep * etp)
    if experts.chunks == "auto" and Speeds.of(config).tflops is None:
        raise ConfigError(
            "experts.chunks=auto goes by the speed of the device, which is not known: set "
            f"{SPEED_KEYS}, or experts.chunks to a number"
        )


def _check_codec(config: Config) -> None:
    """Refuse to round what is to be exact, and codecs of what travels not at all or no shorter."""
    codec, dtype = config.experts.codec, config.model.dtype
    if codec == "none":
        return
    where = f"experts.codec={codec}"
    if dtype == "fp64":
        raise ConfigError(f"{where} rounds what model.dtype=fp64 keeps exact: expected none")
    if config.experts.dispatch == "fetch":
        raise ConfigError(
            f"{where} is for rows, none of which travel with experts.dispatch=fetch: expected "
            "none, or another dispatch"
        )
    if codec == "bf16" and dtype != "fp32":
        raise ConfigError(
            f"{where} makes rows of model.dtype={dtype} no shorter: expected none or int8"
        )


def _check_topology(config: Config) -> None:
    """Refuse bandwidths where a sequence, or an expert, is on several ranks, or nodes are not
    known."""
    experts, parallel, moe = config.experts, config.parallel, config.model.moe
    if experts.topology is None:
        return
    where = f"experts.topology={text_of(experts.topology)}"
    for key in ("cp", "tp", "etp"):
        if getattr(parallel, key) > 1:
            raise ConfigError(
                f"{where} goes by the rank of a sequence and of an expert, and needs "
                f"parallel.{key}=1: expected null, or that"
            )
    if moe.balance_scope == "step":
        raise ConfigError(
            f"{where} goes by the choices of each rank, and has no support for "
            "model.moe.balance_scope=step: expected null, or sequence or microbatch"
        )
    if not experts.tells_nodes:
        return
    if experts.node is None:
        raise ConfigError(f"{where} needs experts.node: expected the ranks of a node")
    if parallel.ep % experts.node or parallel.ep == experts.node:
        raise ConfigError(
            f"experts.node={experts.node} does not make several nodes of parallel.ep="
            f"{parallel.ep} ranks: expected a divisor below it, or two numbers in experts.topology"
        )


def bandwidths(config: Config, index: int) -> list[float] | None:
    """From the rank that is `index` of those over which experts are split, to each of them; None
    where all count alike."""
    topology = config.experts.topology
    if topology is None:
        return None
    node = config.experts.node if len(topology) == 3 else config.parallel.ep
    assert node is not None, "checked"

    def to(other: int) -> float:
        if other == index:
            return topology[0]
        return topology[1 if other // node == index // node else 2]

    return [to(other) for other in range(config.parallel.ep)]


def _check_node(node: int, ranks: int) -> None:
    """Refuse hops that there are not, or nodes that have other parts of a group each."""
    where = f"experts.node={node}: experts are split over {ranks} ranks (parallel.ep x etp)"
    if node >= ranks:
        raise ConfigError(
            f"{where}, all of one node, so experts.dispatch=hierarchical does nothing: expected "
            "all_to_all, or fewer ranks of a node"
        )
    if node == 1 or ranks % node:
        fitting = [size for size in range(2, ranks) if ranks % size == 0]
        wanted = f"node could be {join_or(fitting)}" if fitting else "expected all_to_all"
        raise ConfigError(f"{where}, which do not make whole nodes of several: {wanted}")
