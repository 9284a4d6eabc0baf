"""Copies of experts on other ranks: what is refused, and ranks of a node."""

from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.config.experts import ExpertsConfig
from megapipe.errors import ConfigError
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool_file import write_pools
from megapipe.layout.moe.replicas import check_pool, ep_ranks_per_node
from megapipe.layout.resolve import resolve
from megapipe.plan.measurements import BY_UNITS

BASE = ("model.hidden=64", "model.heads=8", "model.vocab_size=512", "train.global_batch=192")
SPLIT = ("model.moe.experts=8", "parallel.dp=4", "parallel.ep=4")
MIGRATE = ("experts.policy=migrate", "experts.pool=x.json", "log.peak_tflops=1")
BALANCE = ("experts.policy=balance", "experts.slots=2")


def plan(*overrides: str, world: int | None = None) -> Config:
    return resolve(parse([*BASE, *overrides]).config, world, None, measure=BY_UNITS)[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (BALANCE, "experts.policy=balance, experts.slots=2 have no effect without model.moe.expe"),
        (
            ("model.moe.experts=8", *BALANCE),
            "experts.policy=balance, experts.slots=2 have no effect without parallel.ep above 1",
        ),
        (
            (*SPLIT, "parallel.ep=1", "parallel.etp=2", *BALANCE),
            "experts.policy=balance, experts.slots=2 have no effect without parallel.ep above 1",
        ),
        (
            (*SPLIT, "experts.slots=2"),
            "experts.slots=2 has no effect without experts.policy=shadow or balance: expected 0",
        ),
        (
            (*SPLIT, "experts.replan=3"),
            "experts.replan=3 has no effect without experts.policy=shadow, balance or migrate: exp",
        ),
        (
            (*SPLIT, "experts.policy=balance"),
            "experts.policy=balance has no room for copies: expected none, or experts.slots=1",
        ),
        (
            (*SPLIT, *BALANCE, "experts.slots=7"),
            "experts.slots=7 is more than the 6 experts that other ranks have of model.moe.exp",
        ),
        (
            (*SPLIT, *BALANCE, "model.moe.experts=[8,4,8,16]", "experts.slots=4"),
            "than the 3 experts that other ranks have of model.moe.experts=[8, 4, 8, 16] (4 in lay",
        ),
        (
            (*SPLIT, *BALANCE, "experts.dispatch=fetch"),
            "experts.policy=balance has nothing to hold with experts.dispatch=fetch, by which all",
        ),
        (
            (*SPLIT, *BALANCE, "optimizer.zero=3"),
            "optimizer.zero=3 keeps none: expected none, or zero of 2 at most",
        ),
        (
            (*SPLIT, *BALANCE, "optimizer.post_validation=true", "parallel.pp=2"),
            "optimizer.post_validation=true does not wait for: expected none, or false",
        ),
        (
            (*SPLIT, *BALANCE, "lora.rank=2"),
            "lora.rank=2 leaves them as they are: expected none, or null",
        ),
        (
            (*SPLIT, "experts.policy=shadow", "experts.slots=1", "parallel.device=cpu"),
            "experts.policy=shadow goes by the speed of the device, which is not known: set log.",
        ),
        (
            (*SPLIT, *BALANCE, "experts.pool=x"),
            "experts.pool=x has no effect without experts.policy=migrate: expected null, or that",
        ),
        (
            (*SPLIT, *MIGRATE, "experts.slots=1"),
            "experts.slots=1 has no effect without experts.policy=shadow or balance: expected 0",
        ),
        (
            (*SPLIT, *MIGRATE, "experts.pool=null"),
            "experts.policy=migrate takes owners from a pool, and there is none: expected none, or",
        ),
        (
            (*SPLIT, *MIGRATE, "experts.pad=true", "model.moe.capacity=1"),
            "evens out rows, of which experts.pad=true gives all experts as many: expected",
        ),
        (
            (*SPLIT, *MIGRATE, "experts.topology=[4,1]", "model.moe.balance=0.1"),
            "experts.topology=[4.0, 1.0] balances: expected none, or null",
        ),
        (
            (*SPLIT, *MIGRATE, "experts.dispatch=fetch"),
            "experts.policy=migrate has nothing to hold with experts.dispatch=fetch, by which all",
        ),
        (
            (*SPLIT, *MIGRATE, "optimizer.post_validation=true", "parallel.pp=2"),
            "experts.policy=migrate goes by the totals of a step, which optimizer.post_validation",
        ),
        (
            (*SPLIT, *MIGRATE, "lora.rank=2"),
            "experts.policy=migrate is for experts that are trained, and lora.rank=2 leaves",
        ),
        (
            (*SPLIT, *MIGRATE, "log.peak_tflops=null", "parallel.device=cpu"),
            "experts.policy=migrate goes by the speed of the device, which is not known: set log.",
        ),
        ((*SPLIT, *BALANCE, "experts.slots=-1"), "experts.slots=-1: expected"),
        ((*SPLIT, *BALANCE, "experts.replan=0"), "experts.replan=0: expected"),
    ],
)
def test_copies_that_are_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_places_than_choices_can_name_are_refused() -> None:
    """They are int16."""
    many = ("model.moe.experts=20000", "experts.slots=4000", "model.moe.ffn=8")
    with pytest.raises(ConfigError, match="36,000 places on parallel"):
        plan(*SPLIT, *BALANCE, *many)


def test_with_copies_auto_does_not_fetch() -> None:
    """By which all ranks would get all experts."""
    sizes = ("model.moe.ffn=24", "model.bias=false", "train.microbatch=24")
    given = (*SPLIT, *sizes, "experts.dispatch=auto")
    assert plan(*given).experts.dispatch == "fetch"
    assert plan(*given, *BALANCE).experts.dispatch == "all_to_all"


def test_another_layout_with_all_experts_on_each_rank_has_no_copies() -> None:
    others = ("parallel.layouts.half.dp=2", "parallel.layouts.half.ep=1")
    inner = ("parallel.layouts.part.dp=1", "parallel.layouts.part.ep=1")
    given = (*SPLIT, *BALANCE, *others)
    assert plan(*given, world=4).experts.slots == 2
    assert plan(*given, world=2).experts == ExpertsConfig()
    parts = (*SPLIT, *BALANCE, "parallel.dp=8", "parallel.etp=2", *inner, "experts.chunks=2")
    of_parts = (*parts, "parallel.layouts.part.dp=2")
    assert plan(*of_parts, world=2).experts == ExpertsConfig(chunks=2)


def test_another_layout_with_other_ranks_has_no_pool() -> None:
    """Whose owners are of as many ranks as the log that it was made of had."""
    others = ("parallel.layouts.half.dp=2", "parallel.layouts.half.ep=2")
    assert plan(*SPLIT, *MIGRATE, *others, world=4).experts.policy == "migrate"
    assert plan(*SPLIT, *MIGRATE, *others, world=2).experts == ExpertsConfig()


def test_a_pool_is_read_before_the_processes_meet(tmp_path: Path) -> None:
    def check(path: Path) -> None:
        given = (*SPLIT, *MIGRATE, "model.moe.every=2", f"experts.pool={path}")
        check_pool(*resolve(parse([*BASE, *given]).config, None, None))

    path = tmp_path / "pool.json"
    with pytest.raises(ConfigError, match=rf"^experts.pool={path}: No such file or directory$"):
        check(path)
    for ranks in (4, 2):
        write_pools(path, {n: [ExpertMap.even(8, ranks)] for n in range(1, 12, 2)})
        if ranks == 4:
            check(path)
    with pytest.raises(ConfigError, match=f"^experts.pool={path}: layer 1: a map of 8 experts ove"):
        check(path)
    check_pool(*resolve(parse([*BASE, *SPLIT]).config, None, None))


@pytest.mark.parametrize(
    ("keys", "node"),
    [
        ((), 4),
        (("parallel.per_node=2",), 2),
        (("parallel.per_node=3",), 4),
        (("parallel.dp=8", "parallel.etp=2", "parallel.per_node=4"), 2),
        (("experts.dispatch=hierarchical", "experts.node=2"), 2),
    ],
)
def test_a_group_is_of_whole_nodes_or_all_of_one(keys: tuple[str, ...], node: int) -> None:
    assert ep_ranks_per_node(plan(*SPLIT, *keys)) == node
