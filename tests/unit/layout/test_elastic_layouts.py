"""The layout that a number of processes has."""

import pytest

from megapipe.cli import Command, parse
from megapipe.errors import ConfigError
from megapipe.launch.endpoints import NodeRange
from megapipe.launch.launch_info import LaunchInfo
from megapipe.launch.signals import StopRequest
from megapipe.layout.elastic_checks import check_fewest, check_layouts
from megapipe.layout.resolve import resolve
from megapipe.train import job

GIVEN = (
    *("parallel.pp=4", "parallel.tp=2", "pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2"),
    *("train.global_batch=16", "train.microbatch=1", "model.layers=8"),
    *("parallel.elastic_layouts.half.pp=2", "parallel.elastic_layouts.half.microbatch=2"),
    *("parallel.elastic_layouts.one.pp=1", "parallel.elastic_layouts.one.chunks=1"),
    *("parallel.elastic_layouts.one.schedule=gpipe", "parallel.elastic_layouts.one.tp=1"),
)


@pytest.mark.parametrize(
    ("world", "pp", "tp", "dp", "microbatch", "schedule"),
    [
        (8, 4, 2, 1, 1, "interleaved_1f1b"),
        (16, 4, 2, 2, 1, "interleaved_1f1b"),
        (4, 2, 2, 1, 2, "interleaved_1f1b"),
        (2, 1, 1, 2, 1, "gpipe"),
        (1, 1, 1, 1, 1, "gpipe"),
    ],
)
def test_the_first_that_fits(
    world: int, pp: int, tp: int, dp: int, microbatch: int, schedule: str
) -> None:
    config, layout = resolve(parse(GIVEN).config, world, 257)
    assert (layout.pp, layout.tp, layout.dp) == (pp, tp, dp)
    assert config.train.microbatch == microbatch
    assert config.pipeline.schedule == schedule
    assert config.train.global_batch == 16
    assert resolve(config, world, 257)[1] == layout, "also of what was resolved"


def test_the_batch_has_to_divide() -> None:
    """12 processes are 3 replicas of pp 2 x tp 2, and 12 of one process."""
    with pytest.raises(ConfigError, match=r"world size 12: neither .* \(half, one\) fits it with"):
        resolve(parse(GIVEN).config, 12, 257)
    with pytest.raises(ConfigError, match=r"plan\.gpus=12: neither .* \(half, one\) fits it with"):
        resolve(parse([*GIVEN, "plan.gpus=12"]).config, None, 257)


def test_a_given_dp_counts() -> None:
    config = parse([*GIVEN, "parallel.dp=1", "parallel.elastic_layouts.half.dp=1"]).config
    assert resolve(config, 8, 257)[1].dp == 1
    assert resolve(config, 4, 257)[1].pp == 2
    with pytest.raises(ConfigError, match="world size 16"):
        resolve(config, 16, 257)


def test_without_others_the_error_says_more() -> None:
    with pytest.raises(ConfigError, match=r"world size 4 does not divide into pp 4 x cp 1 x tp 2"):
        resolve(parse(GIVEN[:7]).config, 4, 257)
    with pytest.raises(ConfigError, match=r"train.global_batch=16 is not divisible"):
        resolve(parse(GIVEN[:7]).config, 24, 257)


def test_a_layout_that_does_not_go_is_refused() -> None:
    config = parse([*GIVEN, "parallel.elastic_layouts.half.chunks=7"]).config
    assert resolve(config, 8, 257)[1].pp == 4
    with pytest.raises(ConfigError, match="14 pipeline stages"):
        resolve(config, 4, 257)
    with pytest.raises(
        ConfigError, match=r"^run.yaml: parallel.elastic_layouts.half: .*14 pipeline st"
    ):
        check_layouts(config, 8, where="run.yaml")


EXPERTS = (
    *("model.layers=2", "model.moe.num_experts=8", "parallel.dp=4", "parallel.ep=4"),
    *("train.global_batch=8", "train.microbatch=1", "parallel.elastic_layouts.half.ep=2"),
)
HALF = (*EXPERTS, "parallel.elastic_layouts.half.dp=2")
BATCH = ("train.global_batch=2", "train.microbatch=1")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ("experts.dispatch=hierarchical", "experts.ranks_per_node=2"),
            "experts.ranks_per_node=2: experts are split",
        ),
        (
            ("experts.rebalance=balance", "experts.replica_slots=6"),
            "experts.replica_slots=6 is more than the 4 exper",
        ),
        (
            (
                "experts.link_bandwidths=[4,2,1]",
                "experts.ranks_per_node=2",
                "model.moe.aux_loss_coeff=0.1",
            ),
            "experts.ranks_per_node=2 does not make several nodes of parallel.ep=2 ranks",
        ),
        (
            ("parallel.elastic_layouts.half.microbatch=3",),
            "train.global_batch=8 is not divisible by train",
        ),
    ],
)
def test_all_layouts_are_checked_at_the_start(given: tuple[str, ...], words: str) -> None:
    """They would be refused when nodes are lost."""
    config = parse([*HALF, *given]).config
    assert resolve(config, 4, 257)[1].ep == 4
    with pytest.raises(ConfigError) as caught:
        check_layouts(config, 4)
    assert str(caught.value).startswith(f"configuration: parallel.elastic_layouts.half: {words}")
    assert "\n" not in str(caught.value)


def test_a_layout_is_right_that_some_number_of_processes_can_have() -> None:
    """The dp is open: with one process experts could not be split, with 9 the batch not."""
    open_dp = [key for key in HALF if ".dp=" not in key]
    for world in (4, 9, 1):
        check_layouts(parse(open_dp).config, world)
    with pytest.raises(ConfigError, match=r"layouts.half: parallel.ep=3 does not divide dp 4 x"):
        check_layouts(parse([*open_dp, "parallel.elastic_layouts.half.ep=3"]).config, 4)
    check_layouts(parse(GIVEN).config, 8)


def test_a_job_that_could_not_go_on_with_the_least_number_of_nodes_is_refused() -> None:
    """It is refused at its start, and not when the first node is lost."""
    fixed = parse([*BATCH, "parallel.dp=2", "parallel.timeout_s=1"]).config
    with pytest.raises(ConfigError) as caught:
        check_fewest(fixed, NodeRange(1, 2), 1, where="run.yaml")
    assert str(caught.value) == (
        "run.yaml: --nnodes 1:2 lets the job continue with 1 node, for which there is no "
        "layout (world size 1 for dp 2 x pp 1 x cp 1 x tp 1: expected 2): add one to "
        "parallel.elastic_layouts, remove parallel.dp, or set --nnodes 2"
    )
    for given, nodes, ranks in (
        (fixed, NodeRange(2, 2), 1),
        (fixed, NodeRange(1, 2), 2),
        (parse(BATCH).config, NodeRange(1, 2), 1),
        (
            parse([*BATCH, "parallel.dp=2", "parallel.elastic_layouts.one.dp=1"]).config,
            NodeRange(1, 2),
            1,
        ),
    ):
        check_fewest(given, nodes, ranks)
    stop, options = StopRequest.__new__(StopRequest), ("--nnodes", "1:2", "--nproc=1")
    info = LaunchInfo(1, 2, 0, 1, launched=True, hosted=True, options=options)
    with pytest.raises(ConfigError, match=r"^defaults: --nnodes 1:2 lets"):
        job.start(Command(fixed), info, stop)


@pytest.mark.parametrize(
    ("world", "cp", "ulysses", "plan"),
    [(8, 8, 2, "all_gather"), (4, 4, 1, "all_gather"), (2, 1, 1, "ring")],
)
def test_split_positions(world: int, cp: int, ulysses: int, plan: str) -> None:
    """One process per replica has no use for the section `context`, and it is no mistake there."""
    given = (
        *("parallel.cp=8", "context.ulysses=2", "context.algorithm=all_gather", "parallel.dp=1"),
        *("parallel.elastic_layouts.half.cp=4", "parallel.elastic_layouts.half.ulysses=1"),
        *("parallel.elastic_layouts.one.cp=1", "parallel.elastic_layouts.one.dp=2"),
    )
    config, layout = resolve(parse(given).config, world, 257)
    assert (layout.cp, layout.split.ulysses) == (cp, ulysses)
    assert config.context.algorithm == plan
    assert resolve(config, world, 257)[1] == layout
