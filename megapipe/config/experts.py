"""The section `experts` of the configuration: dispatch of tokens to experts on other ranks."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from megapipe.config.moe import EXPERTS, SPLITTABLE
from megapipe.config.section import ExpectedText, Needs, OnResume, Section, UserPath, needs
from megapipe.util.user_code import names_or_code

Dispatch = Literal["all_to_all", "all_gather", "hierarchical", "fetch", "auto"]
COPYING = ("shadow", "balance")
"""Values of ``experts.rebalance`` under which ranks hold expert replicas."""
SPLIT = Needs(
    "parallel.ep or parallel.etp above 1",
    lambda config: config.parallel.ep * config.parallel.etp > 1,
)
OF_MAPS = needs("parallel.ep", above=1)
"""Condition of the keys that determine which ranks hold which experts."""
NODES = Needs(
    "experts.dispatch=hierarchical",
    lambda config: config.experts.dispatch == "hierarchical" or config.experts.is_node_aware,
)


class ExpertsConfig(Section):
    """How tokens are dispatched to experts on other ranks and combined (docs/moe.md), if
    `parallel.ep` or `parallel.etp` splits experts. Only `wire_dtype` and `link_bandwidths` change
    the mathematics, and so does `ranks_per_node` if `link_bandwidths` has three values; `rebalance`
    changes the order of some sums."""

    ON_RESUME = OnResume.HARMLESS
    NEEDS = (SPLITTABLE,)

    dispatch: Annotated[
        Dispatch | Annotated[str, Field(pattern=names_or_code(()))],
        ExpectedText(
            f"one of {', '.join(get_args(Dispatch))}, or a class of your own as module:name"
        ),
        SPLIT,
    ] = "all_to_all"
    """How tokens reach experts. all_to_all: a row for each choice of a token is sent to the
    expert's rank. hierarchical: two all-to-alls in a row, the first within the node and the second
    between nodes, with fewer and larger messages (Tutel, Hwang et al., 2206.03382). all_gather: all
    tokens are sent to all ranks, and outputs return as rows; fewer bytes if a token has more
    choices than there are ranks. fetch: tokens stay, and each rank gets the weights of all experts
    and returns their gradients; fewer bytes if tokens are many and experts small (Janus, Liu et
    al., 2023). auto: all_to_all, all_gather or fetch, whichever sends fewest bytes if tokens choose
    experts evenly; for a class of transformers all_to_all. Or your own class as `module:name`,
    derived from `Dispatcher` (docs/extending.md)."""
    ranks_per_node: Annotated[int | None, SPLIT, NODES] = Field(None, ge=2)
    """Number of ranks per node, for dispatch=hierarchical. Default: the number of ranks that the
    launcher has started on a node; in a plan without a launcher, `parallel.ranks_per_node`. If
    `link_bandwidths` has three values, this key must be set, and it CHANGES RESULTS."""
    overlap_chunks: Annotated[
        Annotated[int, Field(ge=1, le=8)] | Literal["auto"],
        ExpectedText("a whole number >= 1 and <= 8, or auto"),
        EXPERTS,
        SPLIT,
    ] = 1
    """Number of expert chunks into which a rank's experts are divided, each with the rows for its
    experts. Rows of the next chunk (with dispatch=fetch, weights) and outputs of the previous one
    are sent while one is computed (PipeMoE, FasterMoE). auto: the number with the shortest
    simulated time, at the speeds that plans assume (section `plan`)."""
    pad_to_capacity: Annotated[bool, needs("model.moe.capacity_factor")] = False
    """With `model.moe.capacity_factor`: pad the rows of every expert with zeros to its capacity for
    each sequence, and compute all of them. Sizes are then known without counting, so the host does
    not wait for its GPU in MoE layers, even if experts are not split over ranks."""
    wire_dtype: Annotated[Literal["none", "bf16", "int8"], SPLIT, OnResume.LISTED] = "none"
    """Wire type of rows of activations and gradients (ScheMoE, Shi et al., 2024). It CHANGES
    RESULTS: values are rounded, even for experts on the same rank. bf16, for an fp32 model: rounded
    to bfloat16, by at most 1/256 of a value. int8: rounded to 127ths of the largest value of a row,
    so by at most 1/254 of the largest value; a row takes one byte per value, and 4 more."""
    link_bandwidths: Annotated[
        list[Annotated[float, Field(gt=0)]] | None,
        ExpectedText("two or three numbers above 0, as in [4, 2, 1], or null"),
        SPLIT,
        needs("model.moe.aux_loss_coeff"),
        OnResume.LISTED,
    ] = Field(None, min_length=2, max_length=3)
    """Bandwidths from a rank to itself, to other ranks and, if there is a third value, to ranks of
    other nodes (of `ranks_per_node` ranks each); only the ratios matter. The auxiliary loss then
    steers more tokens to near experts (TA-MoE, Chen et al., 2302.09915). It CHANGES RESULTS, which
    then depend on a sequence's rank, so on `parallel.ep` and `train.microbatch`. Default: all
    experts count alike."""
    rebalance: Annotated[Literal["none", "shadow", "balance", "migrate"], EXPERTS, OF_MAPS] = "none"
    """Policy by which ranks get other experts, according to the choices of the previous step. With
    shadow and balance, ranks get replicas of other ranks' experts, so fewer rows are sent. shadow:
    all ranks get replicas of the experts with most rows, as many as save time at the speeds that
    plans assume (FasterMoE, He et al., 2022). balance: replicas are placed so that the busiest rank
    has fewest rows (FlexMoE, Nie et al., 2304.03946). migrate: experts change owners, according to
    the map in `rebalance_pool` with which the busiest rank has fewest rows; here the time to move
    an expert counts too, as the number of rows that take as long (SmartMoE, Zhai et al., 2023)."""
    rebalance_pool: Annotated[UserPath | None, OF_MAPS, needs("experts.rebalance", "migrate")] = (
        None
    )
    """File with the expert maps that `rebalance=migrate` chooses from, besides the current map.
    ``experts.py rebalance -o`` writes it from the log of an earlier run with the same
    `parallel.ep`."""
    replica_slots: Annotated[int, OF_MAPS, needs("experts.rebalance", *COPYING)] = Field(0, ge=0)
    """Number of expert replicas that fit on a rank in each layer, for `rebalance` shadow or
    balance. A replica takes memory for an expert's weights, which are sent after each update, and
    for its gradients, which return to the owner once a step."""
    rebalance_every: Annotated[int, OF_MAPS, needs("experts.rebalance", *COPYING, "migrate")] = (
        Field(10, ge=1)
    )
    """Steps between two changes by `rebalance`. An old map balances less well; a change takes time
    on the host, and moving experts takes time on links."""

    @property
    def is_open(self) -> bool:
        """Whether the dispatch or the number of expert chunks is still auto."""
        return "auto" in (self.dispatch, self.overlap_chunks)

    @property
    def number_of_chunks(self) -> int:
        """Number of expert chunks; 1 while `overlap_chunks` is auto."""
        return 1 if self.overlap_chunks == "auto" else self.overlap_chunks

    @property
    def is_node_aware(self) -> bool:
        """Whether the auxiliary loss depends on nodes (three `link_bandwidths`)."""
        return self.link_bandwidths is not None and len(self.link_bandwidths) == 3

    @property
    def moves(self) -> bool:
        """Whether the ranks that hold an expert may change."""
        return self.rebalance != "none"

    @property
    def copies(self) -> bool:
        """Whether ranks may hold replicas of other ranks' experts."""
        return self.rebalance in COPYING
