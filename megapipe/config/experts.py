"""The section `experts` of the configuration: how tokens get to the experts of other ranks."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from megapipe.config.moe import EXPERTS
from megapipe.config.section import ExpectedText, Needs, OnResume, Section, UserPath, needs
from megapipe.util.user_code import names_or_code

Dispatch = Literal["all_to_all", "all_gather", "hierarchical", "fetch", "auto"]
COPYING = ("shadow", "balance")
"""Policies that make expert replicas."""
SPLIT = Needs(
    "parallel.ep or parallel.etp above 1",
    lambda config: config.parallel.ep * config.parallel.etp > 1,
)
OF_MAPS = needs("parallel.ep", above=1)
"""Need of keys that say which ranks have which experts."""
NODES = Needs(
    "experts.dispatch=hierarchical",
    lambda config: config.experts.dispatch == "hierarchical" or config.experts.tells_nodes,
)


class ExpertsConfig(Section):
    """How tokens get to their experts on other ranks and back (docs/moe.md), where these are split
    by `parallel.ep` or `parallel.etp`. No key but `codec`, `topology` and, beside a topology of
    three, `node` changes the mathematics; `policy` changes the order of some sums."""

    ON_RESUME = OnResume.HARMLESS
    NEEDS = (EXPERTS,)

    dispatch: Annotated[
        Dispatch | Annotated[str, Field(pattern=names_or_code(()))],
        ExpectedText(
            f"one of {', '.join(get_args(Dispatch))}, or a class of your own as module:name"
        ),
        SPLIT,
    ] = "all_to_all"
    """all_to_all: a row for each choice of a token goes to the rank of its expert. hierarchical:
    the same in two hops, within the node and between nodes, whose messages are fewer and larger
    (Tutel, Hwang et al., 2206.03382). all_gather: all tokens go to all ranks, and results come back
    as rows; fewer bytes where a token has more choices than there are ranks. fetch: tokens stay,
    and each rank gets the matrices of all experts and gives their gradients back; fewer bytes where
    tokens are many and experts small (Janus, Liu et al., 2023). auto: all_to_all, all_gather or
    fetch, whichever is fewest bytes where experts are chosen evenly. Or a class of your own as
    `module:name`, derived from `Dispatcher` (docs/extending.md)."""
    node: Annotated[int | None, SPLIT, NODES] = Field(None, ge=2)
    """Ranks of a node, for dispatch=hierarchical; default: as many as the launcher has started on
    one, in a plan without a launcher `parallel.per_node`. For a `topology` of three it is given,
    and CHANGES RESULTS."""
    chunks: Annotated[
        Annotated[int, Field(ge=1, le=8)] | Literal["auto"],
        ExpectedText("a whole number >= 1 and <= 8, or auto"),
        SPLIT,
    ] = 1
    """Parts in which a rank computes its experts, each with the rows for some of them: those of the
    next part travel meanwhile (with dispatch=fetch its matrices), and the results of the one before
    (PipeMoE, FasterMoE). auto: as many as take the least time by simulation, at the speeds that
    plans assume (`parallel.node_gb_s`, `network_gb_s`, `latency_us`, `log.device`,
    `log.efficiency`)."""
    pad: Annotated[bool, needs("model.moe.capacity")] = False
    """With `model.moe.capacity`, whether experts have room for all rows that there can be, those of
    their capacity for each sequence, and those that nobody takes are computed as zeros. Then sizes
    are known without counting, and the host does not wait for its GPU in layers with experts, also
    where these are not split."""
    codec: Annotated[Literal["none", "bf16", "int8"], SPLIT, OnResume.LISTED] = "none"
    """How rows of activations and of gradients look on their way (ScheMoE, Shi et al., 2024). It
    CHANGES RESULTS: values arrive rounded, also those of experts on the same rank. bf16, of an fp32
    model: to bfloat16, by 1/256 of a value at most. int8: to 127ths of the largest value of a row,
    so by 1/254 of that at most; a row is a byte for each value, and 4 more."""
    topology: Annotated[
        list[Annotated[float, Field(gt=0)]] | None,
        ExpectedText("two or three numbers above 0, as in [4, 2, 1], or null"),
        SPLIT,
        needs("model.moe.balance"),
        OnResume.LISTED,
    ] = Field(None, min_length=2, max_length=3)
    """Bandwidths from a rank to itself, to the others and, if there are three, to those of other
    nodes of `node` ranks each; only their ratios matter. The balance term then steers more tokens
    to experts that are near (TA-MoE, Chen et al., 2302.09915), so it CHANGES RESULTS, and makes
    them depend on which rank a sequence is on, by `parallel.ep` and `train.microbatch`. Default:
    all experts count alike."""
    policy: Annotated[Literal["none", "shadow", "balance", "migrate"], OF_MAPS] = "none"
    """Which ranks have which experts, by the choices of the last step. With shadow and balance they
    get expert replicas, of experts that others own, whose rows then travel less. shadow: all ranks
    get those of the experts with most rows, as many as are worth their time, by the speeds that
    plans assume (FasterMoE, He et al., 2022). balance: the ranks get them by which the largest
    number of rows on a rank gets smallest (FlexMoE, Nie et al., 2304.03946). migrate: experts
    change the ranks that own them, to those of a `pool` by which this number gets smallest, where
    an expert that moves counts as the rows whose time it takes (SmartMoE, Zhai et al., 2023)."""
    pool: Annotated[UserPath | None, OF_MAPS, needs("experts.policy", "migrate")] = None
    """File with the owners that `policy` migrate chooses among, beside those that there are:
    what ``experts.py plan -o`` makes of the log of an earlier run, for the same `parallel.ep`."""
    slots: Annotated[int, OF_MAPS, needs("experts.policy", *COPYING)] = Field(0, ge=0)
    """Copies that a rank has room for in each layer, for `policy` shadow or balance. Each is the
    weights of an expert, which come after each update, and its gradients, which go home once a
    step."""
    replan: Annotated[int, OF_MAPS, needs("experts.policy", *COPYING, "migrate")] = Field(10, ge=1)
    """Steps from one choice by the `policy` to the next. What was chosen long ago fits less well;
    to choose takes time on the host, and experts that move that of links."""

    @property
    def is_open(self) -> bool:
        """Whether a form, or a number of chunks, is to be chosen."""
        return "auto" in (self.dispatch, self.chunks)

    @property
    def number_of_chunks(self) -> int:
        """`chunks`; 1 where it is not resolved yet."""
        return 1 if self.chunks == "auto" else self.chunks

    @property
    def tells_nodes(self) -> bool:
        """Whether the balance term tells nodes from each other."""
        return self.topology is not None and len(self.topology) == 3

    @property
    def moves(self) -> bool:
        """Whether the ranks that have an expert may change."""
        return self.policy != "none"

    @property
    def copies(self) -> bool:
        """Whether ranks may have copies of experts that others own."""
        return self.policy in COPYING
