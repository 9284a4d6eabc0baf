"""Expert replicas: what is refused, and ranks of a node."""

from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.config.experts import ExpertsConfig
from megapipe.errors import ConfigError
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool_file import write_pools
from megapipe.layout.moe.rebalance_checks import check_pool, ep_ranks_per_node
from megapipe.layout.resolve import resolve
from megapipe.plan.measurements import BY_UNITS

BASE = ("model.hidden=64", "model.heads=8", "model.vocab_size=512", "train.global_batch=192")
SPLIT = ("model.moe.num_experts=8", "parallel.dp=4", "parallel.ep=4")
MIGRATE = ("experts.rebalance=migrate", "experts.rebalance_pool=x.json", "plan.peak_tflops=1")
BALANCE = ("experts.rebalance=balance", "experts.replica_slots=2")


def plan(*overrides: str, world: int | None = None) -> Config:
    return resolve(parse([*BASE, *overrides]).config, world, None, measure=BY_UNITS)[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            BALANCE,
            (
                "experts.rebalance=balance, experts.replica_slots=2 have no effect without "
                "model.moe.num_experts"
            ),
        ),
        (
            ("model.moe.num_experts=8", *BALANCE),
            (
                "experts.rebalance=balance, experts.replica_slots=2 have no effect without "
                "parallel.ep above 1"
            ),
        ),
        (
            (*SPLIT, "parallel.ep=1", "parallel.etp=2", *BALANCE),
            (
                "experts.rebalance=balance, experts.replica_slots=2 have no effect without "
                "parallel.ep above 1"
            ),
        ),
        (
            (*SPLIT, "experts.replica_slots=2"),
            (
                "experts.replica_slots=2 has no effect without experts.rebalance=shadow or "
                "balance: expected 0"
            ),
        ),
        (
            (*SPLIT, "experts.rebalance_every=3"),
            (
                "experts.rebalance_every=3 has no effect without experts.rebalance=shadow, balance "
                "or migrate: exp"
            ),
        ),
        (
            (*SPLIT, "experts.rebalance=balance"),
            (
                "experts.rebalance=balance has no slots for replicas: expected "
                "experts.rebalance=none, or experts.replica_slots=1"
            ),
        ),
        (
            (*SPLIT, *BALANCE, "experts.replica_slots=7"),
            (
                "experts.replica_slots=7 is more than the 6 experts that other ranks have with "
                "model.moe.num_experts"
            ),
        ),
        (
            (*SPLIT, *BALANCE, "model.moe.num_experts=[8,4,8,16]", "experts.replica_slots=4"),
            (
                "than the 3 experts that other ranks have with model.moe.num_experts=[8, 4, 8, 16] "
                "(4 in lay"
            ),
        ),
        (
            (*SPLIT, *BALANCE, "experts.dispatch=fetch"),
            ("experts.rebalance=balance has no effect with experts.dispatch=fetch, with which all"),
        ),
        (
            (*SPLIT, *BALANCE, "optimizer.zero=3"),
            (
                "optimizer.zero=3 keeps only shards: expected experts.rebalance=none, or "
                "optimizer.zero of"
            ),
        ),
        (
            (*SPLIT, *BALANCE, "optimizer.post_validation=true", "parallel.pp=2"),
            (
                "optimizer.post_validation=true does not wait for them: expected "
                "experts.rebalance=none"
            ),
        ),
        (
            (*SPLIT, *BALANCE, "lora.rank=2"),
            "lora.rank=2 freezes them: expected experts.rebalance=none, or lora.rank=null",
        ),
        (
            (*SPLIT, "experts.rebalance=shadow", "experts.replica_slots=1", "parallel.device=cuda"),
            (
                "experts.rebalance=shadow needs the speed of the device, which is not known: "
                "set plan.device"
            ),
        ),
        (
            (*SPLIT, *BALANCE, "experts.rebalance_pool=x"),
            (
                "experts.rebalance_pool=x has no effect without experts.rebalance=migrate: "
                "expected null, or that setting"
            ),
        ),
        (
            (*SPLIT, *MIGRATE, "experts.replica_slots=1"),
            (
                "experts.replica_slots=1 has no effect without experts.rebalance=shadow or "
                "balance: expected 0"
            ),
        ),
        (
            (*SPLIT, *MIGRATE, "experts.rebalance_pool=null"),
            ("experts.rebalance=migrate needs a pool of maps: expected experts.rebalance=none, or"),
        ),
        (
            (*SPLIT, *MIGRATE, "experts.pad_to_capacity=true", "model.moe.capacity_factor=1"),
            (
                "balances rows, but experts.pad_to_capacity=true pads every expert to the "
                "same number: expected"
            ),
        ),
        (
            (*SPLIT, *MIGRATE, "experts.link_bandwidths=[4,1]", "model.moe.aux_loss_coeff=0.1"),
            (
                "experts.link_bandwidths=[4.0, 1.0] weights the auxiliary loss by where they are: "
                "expected"
            ),
        ),
        (
            (*SPLIT, *MIGRATE, "experts.dispatch=fetch"),
            ("experts.rebalance=migrate has no effect with experts.dispatch=fetch, with which all"),
        ),
        (
            (*SPLIT, *MIGRATE, "optimizer.post_validation=true", "parallel.pp=2"),
            ("experts.rebalance=migrate needs the totals of a step, but optimizer.post_validation"),
        ),
        (
            (*SPLIT, *MIGRATE, "lora.rank=2"),
            "experts.rebalance=migrate needs trained experts, but lora.rank=2 freezes them",
        ),
        (
            (*SPLIT, *MIGRATE, "plan.peak_tflops=null", "parallel.device=cuda"),
            (
                "experts.rebalance=migrate needs the speed of the device, which is not known: "
                "set plan.device"
            ),
        ),
        ((*SPLIT, *BALANCE, "experts.replica_slots=-1"), "experts.replica_slots=-1: expected"),
        ((*SPLIT, *BALANCE, "experts.rebalance_every=0"), "experts.rebalance_every=0: expected"),
    ],
)
def test_copies_that_are_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_places_than_choices_can_name_are_refused() -> None:
    """Choices are int16."""
    many = (
        "model.moe.num_experts=20000",
        "experts.replica_slots=4000",
        "model.moe.expert_ffn_hidden=8",
    )
    with pytest.raises(ConfigError, match="36,000 slots on parallel"):
        plan(*SPLIT, *BALANCE, *many)


def test_with_copies_auto_does_not_fetch() -> None:
    """Fetching would give all experts to all ranks."""
    sizes = ("model.moe.expert_ffn_hidden=24", "model.bias=false", "train.microbatch=24")
    given = (*SPLIT, *sizes, "experts.dispatch=auto")
    assert plan(*given).experts.dispatch == "fetch"
    assert plan(*given, *BALANCE).experts.dispatch == "all_to_all"


def test_another_layout_with_all_experts_on_each_rank_has_no_copies() -> None:
    others = ("parallel.elastic_layouts.half.dp=2", "parallel.elastic_layouts.half.ep=1")
    inner = ("parallel.elastic_layouts.part.dp=1", "parallel.elastic_layouts.part.ep=1")
    given = (*SPLIT, *BALANCE, *others)
    assert plan(*given, world=4).experts.replica_slots == 2
    assert plan(*given, world=2).experts == ExpertsConfig()
    parts = (
        *SPLIT,
        *BALANCE,
        "parallel.dp=8",
        "parallel.etp=2",
        *inner,
        "experts.overlap_chunks=2",
    )
    of_parts = (*parts, "parallel.elastic_layouts.part.dp=2")
    assert plan(*of_parts, world=2).experts == ExpertsConfig(overlap_chunks=2)


def test_another_layout_with_other_ranks_has_no_pool() -> None:
    """A pool's owners are of as many ranks as the log had from which it was found."""
    others = ("parallel.elastic_layouts.half.dp=2", "parallel.elastic_layouts.half.ep=2")
    assert plan(*SPLIT, *MIGRATE, *others, world=4).experts.rebalance == "migrate"
    assert plan(*SPLIT, *MIGRATE, *others, world=2).experts == ExpertsConfig()


def test_a_pool_is_read_before_the_processes_meet(tmp_path: Path) -> None:
    def check(path: Path) -> None:
        given = (*SPLIT, *MIGRATE, "model.moe.layer_freq=2", f"experts.rebalance_pool={path}")
        check_pool(*resolve(parse([*BASE, *given]).config, None, None))

    path = tmp_path / "pool.json"
    with pytest.raises(
        ConfigError, match=rf"^experts.rebalance_pool={path}: No such file or directory$"
    ):
        check(path)
    for ranks in (4, 2):
        write_pools(path, {n: [ExpertMap.even(8, ranks)] for n in range(1, 12, 2)})
        if ranks == 4:
            check(path)
    with pytest.raises(
        ConfigError, match=f"^experts.rebalance_pool={path}: layer 1: a map of 8 experts ove"
    ):
        check(path)
    check_pool(*resolve(parse([*BASE, *SPLIT]).config, None, None))


@pytest.mark.parametrize(
    ("keys", "node"),
    [
        ((), 4),
        (("parallel.ranks_per_node=2",), 2),
        (("parallel.ranks_per_node=3",), 4),
        (("parallel.dp=8", "parallel.etp=2", "parallel.ranks_per_node=4"), 2),
        (("experts.dispatch=hierarchical", "experts.ranks_per_node=2"), 2),
    ],
)
def test_a_group_is_of_whole_nodes_or_all_of_one(keys: tuple[str, ...], node: int) -> None:
    assert ep_ranks_per_node(plan(*SPLIT, *keys)) == node
