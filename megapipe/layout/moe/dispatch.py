"""Resolves and checks how tokens are dispatched to experts (section `experts`)."""

from __future__ import annotations

from megapipe.config.config import Config
from megapipe.config.experts import ExpertsConfig
from megapipe.config.strict_yaml import text_of
from megapipe.errors import ConfigError
from megapipe.layout.moe.rebalance_checks import check_rebalance
from megapipe.layout.speeds import SPEED_KEYS, Speeds
from megapipe.model.gpt.moe.checks import experts_in
from megapipe.text import join_or
from megapipe.util.user_code import is_user_code

MOST_CHUNKS = 8
BY_BYTES = ("all_to_all", "all_gather", "fetch")
"""Modes that ``dispatch=auto`` chooses from by bytes sent; ties go to the first."""


def on_nodes(config: Config, ranks: int) -> Config:
    """Return `config` with ``experts.ranks_per_node`` set to `ranks`, the ranks that the launcher
    has started per node; unchanged if the key is set, or dispatch is not hierarchical."""
    experts = config.experts
    if experts.dispatch != "hierarchical" or experts.ranks_per_node is not None:
        return config
    return config.model_copy(
        update={"experts": experts.model_copy(update={"ranks_per_node": ranks})}
    )


def resolved_experts(config: Config) -> ExpertsConfig:
    """Fill in ``ranks_per_node`` for hierarchical dispatch. If experts are not split over ranks,
    replace each `auto`. `config.model` is resolved."""
    experts, parallel = config.experts, config.parallel
    if experts.dispatch == "hierarchical" and experts.ranks_per_node is None:
        experts = experts.model_copy(update={"ranks_per_node": parallel.ranks_per_node})
    if config.model.moe.num_experts is not None and parallel.ep * parallel.etp > 1:
        return experts
    dispatch = BY_BYTES[0] if experts.dispatch == "auto" else experts.dispatch
    return experts.model_copy(
        update={"dispatch": dispatch, "overlap_chunks": experts.number_of_chunks}
    )


def dispatch_candidates(config: Config) -> tuple[str, ...]:
    """Return the modes that ``dispatch=auto`` chooses from. fetch is one of them unless a wire type
    or rebalancing is set, which have an effect only on rows that are sent."""
    travel = config.experts.wire_dtype != "none" or config.experts.moves
    return tuple(form for form in BY_BYTES if form != "fetch" or not travel)


def most_chunks(config: Config) -> int:
    """Return the largest number of expert chunks that every MoE layer allows, at most 8."""
    moe = config.model.moe
    layers = filter(moe.has_experts, range(config.model.layers))
    return min(MOST_CHUNKS, *(moe.experts_of(layer) // config.parallel.ep for layer in layers))


def check_dispatch(config: Config) -> None:
    """Refuse sizes that do not divide, and keys that conflict. ep and etp are checked already."""
    experts, moe = config.experts, config.model.moe
    ep, etp = config.parallel.ep, config.parallel.etp
    if ep * etp == 1:
        return
    if is_user_code(experts.dispatch):
        from megapipe.layers.moe.dispatchers import load_dispatcher  # loads torch

        load_dispatcher(experts.dispatch)
    _check_codec(config)
    _check_topology(config)
    if experts.dispatch == "hierarchical":
        _check_node(experts.ranks_per_node or 1, ep * etp)
    if moe.num_experts is None:
        _check_of_class(config)
        return
    check_rebalance(config)
    for layer in filter(moe.has_experts, range(config.model.layers)):
        here = moe.experts_of(layer) // ep
        if experts.number_of_chunks > here:
            raise ConfigError(
                f"experts.overlap_chunks={experts.overlap_chunks} is more than the {here} "
                f"experts per rank with {experts_in(moe, layer)} and parallel.ep={ep}: "
                "expected at most that"
            )
    if experts.overlap_chunks == "auto" and Speeds.of(config).tflops is None:
        raise ConfigError(
            "experts.overlap_chunks=auto needs the speed of the device, which is not known: "
            f"set {SPEED_KEYS}, or experts.overlap_chunks to a number"
        )


def _check_of_class(config: Config) -> None:
    """Refuse a dispatch that the experts of a class of transformers do not have."""
    if config.experts.dispatch == "fetch":
        raise ConfigError(
            f"experts.dispatch=fetch: the experts of model.source={config.model.source} stay where "
            "they are; expected all_to_all, all_gather or hierarchical"
        )


def _check_codec(config: Config) -> None:
    """Refuse wire types that round fp64, are not used, or make rows no smaller."""
    codec, dtype = config.experts.wire_dtype, config.model.dtype
    if codec == "none":
        return
    setting = f"experts.wire_dtype={codec}"
    if dtype == "fp64":
        raise ConfigError(f"{setting} rounds what model.dtype=fp64 keeps exact: expected none")
    if config.experts.dispatch == "fetch":
        raise ConfigError(
            f"{setting} has no effect with experts.dispatch=fetch, which sends no rows: "
            "expected experts.wire_dtype=none, or another experts.dispatch"
        )
    if codec == "bf16" and dtype != "fp32":
        raise ConfigError(
            f"{setting} does not make rows of model.dtype={dtype} smaller: expected none or int8"
        )


def _check_topology(config: Config) -> None:
    """Refuse ``link_bandwidths`` if a sequence or an expert is split over ranks, if the auxiliary
    loss is computed per step, or if three bandwidths lack a valid ``ranks_per_node``."""
    experts, parallel, moe = config.experts, config.parallel, config.model.moe
    if experts.link_bandwidths is None:
        return
    setting = f"experts.link_bandwidths={text_of(experts.link_bandwidths)}"
    for key in ("cp", "tp", "etp"):
        if getattr(parallel, key) > 1:
            raise ConfigError(
                f"{setting} needs one rank per sequence and expert: expected "
                f"experts.link_bandwidths=null, or parallel.{key}=1"
            )
    if moe.aux_loss_scope == "step":
        raise ConfigError(
            f"{setting} needs the choices of each rank: expected experts.link_bandwidths=null, "
            "or model.moe.aux_loss_scope=sequence or microbatch, not step"
        )
    if not experts.is_node_aware:
        return
    if experts.ranks_per_node is None:
        raise ConfigError(
            f"{setting} needs experts.ranks_per_node: set it to the number of ranks in a node"
        )
    if parallel.ep % experts.ranks_per_node or parallel.ep == experts.ranks_per_node:
        raise ConfigError(
            f"experts.ranks_per_node={experts.ranks_per_node} does not make several nodes of "
            f"parallel.ep={parallel.ep} ranks: expected a divisor below it, or two numbers in "
            "experts.link_bandwidths"
        )


def bandwidths(config: Config, index: int) -> list[float] | None:
    """Return the bandwidths from ep rank `index` to every ep rank; None if not configured."""
    topology = config.experts.link_bandwidths
    if topology is None:
        return None
    node = config.experts.ranks_per_node if len(topology) == 3 else config.parallel.ep
    assert node is not None, "checked"

    def to(other: int) -> float:
        if other == index:
            return topology[0]
        return topology[1 if other // node == index // node else 2]

    return [to(other) for other in range(config.parallel.ep)]


def _check_node(node: int, ranks: int) -> None:
    """Refuse hierarchical dispatch over one node, or nodes that split the ranks unevenly."""
    setting = (
        f"experts.ranks_per_node={node}: experts are split over {ranks} ranks (parallel.ep x etp)"
    )
    if node >= ranks:
        raise ConfigError(
            f"{setting}, all in one node, so experts.dispatch=hierarchical has no effect: "
            "expected experts.dispatch=all_to_all, or a smaller experts.ranks_per_node"
        )
    if node == 1 or ranks % node:
        fitting = [size for size in range(2, ranks) if ranks % size == 0]
        wanted = f"node could be {join_or(fitting)}" if fitting else "expected all_to_all"
        raise ConfigError(f"{setting}, which do not divide into nodes of several ranks: {wanted}")
