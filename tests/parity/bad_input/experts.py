"""Values of keys of experts: of the model, of their ranks, of their replicas, of other layouts."""

from __future__ import annotations

from tests.parity.bad_input.case import Bad

LOSES_NODES = (
    "model.moe.num_experts=8 parallel.dp=4 parallel.ep=4 parallel.elastic_layouts.half.dp=2 "
    "parallel.elastic_layouts.half.ep=2"
)
"""Settings with experts over four ranks, and over two if no more are left."""
EXPERTS = [
    Bad("experts that are no number", "model.moe.num_experts=many", 2,
        ("model.moe.num_experts=many: expected a whole number >= 2",)),
    Bad("a key of experts without any", "model.moe.top_k=1", 2,
        ("model.moe.top_k=1 has no effect without model.moe.num_experts",)),
    Bad("a dense layer that there is not", "model.moe.num_experts=4 model.moe.dense_layers=[7]", 2,
        ("model.moe.dense_layers=[7]: there is no layer 7",)),
    Bad("more choices than experts", "model.moe.num_experts=2 model.moe.top_k=3", 2,
        ("model.moe.top_k=3 is more than model.moe.num_experts=2",)),
    Bad("groups that do not divide",
        "model.moe.num_experts=4 model.moe.num_groups=3 model.moe.topk_groups=1", 2,
        ("model.moe.num_experts=4 is not divisible by model.moe.num_groups=3",)),
    Bad("one choice of weight 1", "model.moe.num_experts=4 model.moe.top_k=1", 2,
        ("model.moe.top_k=1", "expected model.moe.norm_topk_prob=false")),
    Bad("places by choice in slices", "model.moe.num_experts=4 model.moe.capacity_factor=1 "
        "pipeline.schedule=seq1f1b pipeline.sequence_slices=2 parallel.pp=2", 2,
        ("pipeline.schedule=seq1f1b cuts sequences", "model.moe.drop_policy=choice",
         "expected position")),
    Bad("experts over tp", "model.moe.num_experts=4 parallel.tp=2", 2,
        ("model.moe.num_experts=4 needs parallel.sequence_parallel=true with parallel.tp=2",)),
    Bad("experts over ranks that there are not", "model.moe.num_experts=4 parallel.ep=4", 2,
        ("parallel.ep=4 does not divide dp 2 x cp 1 x tp 1 = 2", "ep could be 1 or 2")),
    Bad("experts that ep does not divide", "model.moe.num_experts=3 parallel.ep=2", 2,
        ("model.moe.num_experts=3 is not divisible by parallel.ep=2",)),
    Bad("fewer numbers of experts than layers", "model.moe.num_experts=[4]", 2,
        (("model.moe.num_experts=[4] has 1 number: expected 2, one per MoE layer (0-1)"),)),
    Bad("a number of experts that is zero", "model.moe.num_experts=[4,0]", 2,
        ("model.moe.num_experts=[4, 0]: expected a whole number >= 2", "a list of such numbers")),
    Bad("a layer's experts that ep does not divide", "model.moe.num_experts=[4,5] parallel.ep=2", 2,
        ("model.moe.num_experts=[4, 5] (5 in layer 1) is not divisible by parallel.ep=2",)),
    Bad("a width that etp does not divide",
        "model.moe.num_experts=4 model.moe.expert_ffn_hidden=9 parallel.etp=2", 2,
        ("model.moe.expert_ffn_hidden=9 is not divisible by parallel.etp=2",)),
    Bad("ep without experts", "parallel.ep=2", 2,
        ("parallel.ep=2 has no effect without model.moe.num_experts: expected 1, or that",)),
    Bad("a dispatch without experts", "experts.dispatch=all_gather", 2,
        (("experts.dispatch=all_gather has no effect without model.moe.num_experts: "
          "expected all_to_"),)),
    Bad("chunks of what does not travel", "model.moe.num_experts=4 experts.overlap_chunks=2", 2,
        (("experts.overlap_chunks=2 has no effect without parallel.ep or parallel.etp above 1: "
          "expected"),)),
    Bad("room for as many rows as there are tokens",
        "model.moe.num_experts=4 parallel.ep=2 experts.pad_to_capacity=true", 2,
        (("experts.pad_to_capacity=true has no effect without model.moe.capacity_factor: "
          "expected false, or that setting"),)),
    Bad("more chunks than experts",
        "model.moe.num_experts=4 parallel.ep=2 experts.overlap_chunks=3", 2,
        (("experts.overlap_chunks=3 is more than the 2 experts per rank with "
          "model.moe.num_experts=4"),
         "expected at most that")),
    Bad("more chunks than there may be", "experts.overlap_chunks=9", 2,
        ("experts.overlap_chunks=9: expected a whole number >= 1 and <= 8",)),
    Bad("nodes that nothing asks for",
        "model.moe.num_experts=4 parallel.ep=2 experts.ranks_per_node=2", 2,
        ("experts.ranks_per_node=2 has no effect without experts.dispatch=hierarchical",)),
    Bad("two hops on one node",
        "model.moe.num_experts=4 parallel.ep=2 experts.dispatch=hierarchical", 2,
        ("experts.ranks_per_node=2: experts are split over 2 ranks", "all in one node",
         "experts.dispatch=hierarchical has no effect: expected experts.dispatch=all_to_all")),
    Bad("a second choice that is dropped, and a third",
        "model.moe.num_experts=4 model.moe.top_k=3 model.moe.second_expert=random", 2,
        (("model.moe.second_expert=random needs model.moe.top_k=2, not 3: expected "
          "model.moe.second_expert=always, or model.moe.top_k=2"),),
        before_groups=True),
    Bad("more choices than experts of the chosen groups",
        "model.moe.num_experts=8 model.moe.num_groups=4 model.moe.topk_groups=1 model.moe.top_k=3",
        2, ("model.moe.top_k=3 is more than the 2 experts of model.moe.topk_groups=1 groups",
         "expected at most 2"),
        before_groups=True),
    Bad("a balance of micro-batches that are cut into halves",
        "model.moe.num_experts=4 model.moe.aux_loss_scope=microbatch parallel.pp=2 "
        "pipeline.schedule=chimera_backward_halving train.microbatch=2", 2,
        ("pipeline.schedule=chimera_backward_halving cuts micro-batches into parts",
         "model.moe.aux_loss_scope=microbatch", "expected sequence or step"),
        before_groups=True),
    Bad("room for copies that nothing makes",
        "model.moe.num_experts=4 parallel.ep=2 experts.replica_slots=1", 2,
        (("experts.replica_slots=1 has no effect without experts.rebalance=shadow or balance: "
          "expected 0"),),
        before_groups=True),
    Bad("copies where each rank has all experts",
        "model.moe.num_experts=4 model.moe.expert_ffn_hidden=8 parallel.etp=2 "
        "experts.rebalance=balance", 2,
        ("experts.rebalance=balance has no effect without parallel.ep above 1: expected none",),
        before_groups=True),
    Bad("copies of weights that no rank has whole", "model.moe.num_experts=4 parallel.ep=2 "
        "experts.rebalance=balance experts.replica_slots=1 optimizer.zero=3", 2,
        ("experts.rebalance=balance sends whole weights to replicas, but optimizer.zero=3 keeps",
         "expected experts.rebalance=none, or optimizer.zero of at most 2"),
        before_groups=True),
    Bad("copies by totals that nothing waits for", "model.moe.num_experts=4 parallel.ep=2 "
        "experts.rebalance=balance experts.replica_slots=1 optimizer.post_validation=true", 2,
        ("experts.rebalance=balance needs the totals of a step",
         "expected experts.rebalance=none, or optimizer.post_validation=false"),
        before_groups=True),
    Bad("rows that are rounded in fp64",
        "model.moe.num_experts=4 parallel.ep=2 experts.wire_dtype=int8 model.dtype=fp64", 2,
        ("experts.wire_dtype=int8 rounds what model.dtype=fp64 keeps exact: expected none",),
        before_groups=True),
    Bad("experts and their parts over ranks that there are not",
        "model.moe.num_experts=4 parallel.ep=2 parallel.etp=2", 2,
        ("parallel.ep=2 x parallel.etp=2 does not divide dp 2 x cp 1 x tp 1 = 2",
         "ep x etp could be 1 or 2"),
        before_groups=True),
    Bad("two hops on one node, once nodes are lost",
        f"{LOSES_NODES} experts.dispatch=hierarchical experts.ranks_per_node=2", 2,
        ("parallel.elastic_layouts.half: experts.ranks_per_node=2: experts are split over 2 ranks",
         "all in one node"), ranks=4, before_groups=True),
    Bad("more room for copies than experts, once nodes are lost",
        f"{LOSES_NODES} experts.rebalance=balance experts.replica_slots=6", 2,
        (("parallel.elastic_layouts.half: experts.replica_slots=6 is more than the 4 experts that "
          "other ranks have"),
         "and parallel.ep=2: expected at most that"), ranks=4, before_groups=True),
    Bad("bandwidths of nodes, of which one is left",
        f"{LOSES_NODES} experts.link_bandwidths=[4,2,1] experts.ranks_per_node=2 "
        "model.moe.aux_loss_coeff=0.1", 2,
        (("parallel.elastic_layouts.half: experts.ranks_per_node=2 does not make several nodes of "
          "parallel.ep=2"),),
        ranks=4, before_groups=True),
]  # fmt: skip
