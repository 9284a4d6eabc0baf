"""Which way tokens go to experts, where the bytes decide, and what is refused."""

import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.config.experts import ExpertsConfig
from megapipe.errors import ConfigError
from megapipe.layout.layout import Layout
from megapipe.layout.measurements import ExpertForm
from megapipe.layout.moe.dispatch import bandwidths, on_nodes
from megapipe.layout.resolve import resolve
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.moe.dispatch_traffic import experts_sent
from megapipe.plan.units import Units

BASE = ("model.hidden=64", "model.heads=8", "model.vocab_size=512", "train.global_batch=192")
AUTO = "experts.dispatch=auto"
HIERARCHICAL = "experts.dispatch=hierarchical"
TWO = ("parallel.dp=2", "parallel.ep=2")
CODECS = ("none", "bf16", "int8")


def plan(*overrides: str) -> tuple[Config, Layout]:
    given = parse([*BASE, "model.moe.num_experts=16", *overrides]).config
    return resolve(given, None, None, measure=BY_UNITS)


@pytest.mark.parametrize(
    ("top_k", "ep", "etp", "form"),
    [
        (2, 4, 1, "all_to_all"),
        (4, 4, 1, "all_to_all"),
        (5, 4, 1, "all_gather"),
        (8, 2, 1, "all_gather"),
        (4, 2, 2, "all_gather"),
        (2, 2, 4, "all_to_all"),
        (1, 1, 8, "all_to_all"),
        (8, 1, 1, "all_to_all"),
    ],
)
def test_auto_gathers_where_tokens_have_more_choices_than_there_are_ranks(
    top_k: int, ep: int, etp: int, form: str
) -> None:
    """Numbers of choices, and of ranks with other experts: rows go to all that share one."""
    keys = (f"model.moe.top_k={top_k}", f"parallel.ep={ep}", f"parallel.etp={etp}")
    wide = ("parallel.dp=8", "model.moe.norm_topk_prob=false", "model.moe.expert_ffn_hidden=4096")
    config, _ = plan(*wide, *keys, AUTO)
    assert config.experts.dispatch == form
    assert resolve(config, None, None)[0] == config


def test_auto_fetches_where_experts_are_fewer_bytes_than_rows() -> None:
    """F, I and W move matrices twice and gradients in fp32 once, or rows four times and a weight
    twice."""
    seen = set()
    for rows in (1, 2, 4, 8, 16, 32):
        sizes = ("model.moe.expert_ffn_hidden=24", "model.bias=false", "train.sequence_length=64")
        batch = f"train.microbatch={rows}"
        config, _ = plan("parallel.dp=2", "parallel.ep=2", *sizes, batch, AUTO)
        assert config.model.dtype == "fp32"
        tokens, h, matrices = rows * 64, 64, 16 * 2 * 64 * 24
        fewer = matrices * (4 + 4 + 4) < tokens * 2 * (4 * h * 4 + 2 * 4)
        assert config.experts.dispatch == ("fetch" if fewer else "all_to_all"), rows
        seen.add(fewer)
    assert seen == {True, False}


def test_with_a_codec_auto_does_not_fetch() -> None:
    """Matrices travel as they are; of coded rows fewer choices are fewer bytes than tokens."""
    sizes = ("model.moe.expert_ffn_hidden=8", "model.bias=false", "train.microbatch=32")
    each = (*sizes, "parallel.dp=2", "parallel.ep=2", AUTO)
    forms = [plan(*each, f"experts.wire_dtype={codec}")[0].experts.dispatch for codec in CODECS]
    assert forms == ["fetch", "all_to_all", "all_to_all"]
    assert plan(*each, "experts.wire_dtype=int8", "model.moe.top_k=4")[0].experts.dispatch == (
        "all_gather"
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("experts.wire_dtype=int8", "model.dtype=fp64"),
            "experts.wire_dtype=int8 rounds what model.dtype=fp64 keeps exact: expected none",
        ),
        (
            ("experts.wire_dtype=bf16", "model.dtype=bf16"),
            (
                "experts.wire_dtype=bf16 does not make rows of model.dtype=bf16 smaller: "
                "expected none or int8"
            ),
        ),
        (
            ("experts.wire_dtype=int8", "experts.dispatch=fetch"),
            (
                "has no effect with experts.dispatch=fetch, which sends no rows: expected "
                "experts.wire_dtype"
            ),
        ),
        (
            ("experts.wire_dtype=int8", "parallel.ep=1"),
            "experts.wire_dtype=int8 has no effect without parallel.ep or parallel.etp above 1",
        ),
    ],
)
def test_codecs_that_are_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan("parallel.dp=2", "parallel.ep=2", *overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keys", [(), (AUTO,), (*TWO, "experts.overlap_chunks=auto")])
def test_room_for_all_rows_needs_a_capacity(keys: tuple[str, ...]) -> None:
    """It needs no number of ranks."""
    with pytest.raises(ConfigError) as caught:
        plan("experts.pad_to_capacity=true", *keys)
    needed = (
        "experts.pad_to_capacity=true has no effect without model.moe.capacity_factor: "
        "expected false, or that setting"
    )
    assert str(caught.value) == f"configuration: {needed}"
    config, layout = plan(
        "experts.pad_to_capacity=true", "model.moe.capacity_factor=1", "plan.peak_tflops=1", *keys
    )
    assert config.experts.pad_to_capacity
    assert layout.model.conditions.pad_to_capacity


def test_bandwidths_from_a_rank() -> None:
    keys = (
        "parallel.dp=8",
        "parallel.ep=4",
        "experts.link_bandwidths=[8,2,1]",
        "experts.ranks_per_node=2",
    )
    config, _ = plan(*keys)
    found = [bandwidths(config, index) for index in range(4)]
    assert found == [[8, 2, 1, 1], [2, 8, 1, 1], [1, 1, 8, 2], [1, 1, 2, 8]]
    config, _ = plan("parallel.dp=8", "parallel.ep=4", "experts.link_bandwidths=[8,2]")
    assert bandwidths(config, 1) == [2, 8, 2, 2]
    assert bandwidths(plan()[0], 0) is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("experts.link_bandwidths=[1]",),
            "experts.link_bandwidths=[1]: expected two or three numbers above 0, as in [4, 2, 1]",
        ),
        (("experts.link_bandwidths=[1,0]",), "expected two or three numbers above 0"),
        (
            ("experts.link_bandwidths=[2,1]", "model.moe.aux_loss_coeff=0"),
            (
                "experts.link_bandwidths=[2.0, 1.0] has no effect without "
                "model.moe.aux_loss_coeff: expected null"
            ),
        ),
        (
            ("experts.link_bandwidths=[2,1]", "parallel.tp=2", "parallel.sequence_parallel=true"),
            "expected experts.link_bandwidths=null, or parallel.tp=1",
        ),
        (
            ("experts.link_bandwidths=[2,1]", "parallel.etp=2"),
            "expected experts.link_bandwidths=null, or parallel.etp=1",
        ),
        (
            ("experts.link_bandwidths=[2,1]", "model.moe.aux_loss_scope=step"),
            "null, or model.moe.aux_loss_scope=sequence or microbatch, not step",
        ),
        (
            ("experts.link_bandwidths=[4,2,1]",),
            "needs experts.ranks_per_node: set it to the number of ranks in a node",
        ),
        (
            ("experts.link_bandwidths=[4,2,1]", "experts.ranks_per_node=4"),
            (
                "experts.ranks_per_node=4 does not make several nodes of parallel.ep=4 ranks: "
                "expected a divisor"
            ),
        ),
        (
            ("experts.link_bandwidths=[2,1]", "experts.ranks_per_node=2"),
            "experts.ranks_per_node=2 has no effect without experts.dispatch=hierarchical",
        ),
    ],
)
def test_topologies_that_are_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan("parallel.dp=8", "parallel.ep=4", *overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sixteen_times_fewer_bytes_where_rows_are_sixteen_times_the_matrices() -> None:
    """Janus: R is the rows of one forward, both ways, over the values of all experts' matrices."""
    sizes = ("model.moe.expert_ffn_hidden=16", "model.bias=false", "train.sequence_length=64")
    tokens, matrices = 32 * 64, 16 * 2 * 16
    assert 2 * tokens * 2 == 16 * matrices
    sent = {}
    for form in ("all_to_all", "fetch"):
        keys = ("parallel.dp=2", "parallel.ep=2", "train.microbatch=32", f"experts.dispatch={form}")
        each = experts_sent(Units(*plan(*keys, *sizes)).of_layer(0, form), "F")
        sent[form] = sum(e.bytes for e in each)
    weights = tokens * 2 * 4
    assert sent["all_to_all"] - weights == 16 * sent["fetch"]


OPEN = (
    "parallel.dp=2",
    "parallel.ep=2",
    AUTO,
    "experts.overlap_chunks=auto",
    "plan.peak_tflops=0.001",
)
SMALL = (
    "model.moe.expert_ffn_hidden=8",
    "model.bias=false",
    "train.microbatch=32",
    "plan.link_latency_us=0",
)


def test_auto_stays_until_somebody_measures() -> None:
    """Processes that have not met have a layout by which they can, of rows in one chunk."""
    keys = ("model.moe.num_experts=16", *OPEN, *SMALL)
    config, layout = resolve(parse([*BASE, *keys]).config, None, None)
    assert (config.experts.dispatch, config.experts.overlap_chunks) == ("auto", "auto")
    assert not layout.is_final
    assert resolve(config, None, None, before=layout) == (config, layout)
    known = resolve(config, None, None, before=layout, measure=BY_UNITS)
    assert known == plan(*keys)
    assert (known[0].experts.dispatch, known[0].experts.overlap_chunks) == ("fetch", 8)
    assert known[1].is_final


def test_what_is_chosen_is_checked() -> None:
    wrong = BY_UNITS._replace(experts=lambda config, layout: ExpertForm("fetch", 9))
    given = parse([*BASE, "model.moe.num_experts=16", *OPEN]).config
    with pytest.raises(
        ConfigError, match=r"experts\.overlap_chunks=9 is more than the 8 experts per"
    ):
        resolve(given, None, None, measure=wrong)


def test_where_no_experts_travel_auto_is_nothing() -> None:
    config, _ = resolve(parse([*BASE, AUTO]).config, None, None)
    assert config.experts == ExpertsConfig()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("parallel.dp=8", "parallel.ep=8", "experts.ranks_per_node=3"),
            "which do not divide into nodes of several ranks: node could be 2 or 4",
        ),
        (
            ("parallel.dp=3", "parallel.ep=1", "parallel.etp=3", "model.moe.expert_ffn_hidden=12"),
            (
                "all in one node, so experts.dispatch=hierarchical has no effect: expected "
                "experts.dispatch"
            ),
        ),
        (
            (
                "parallel.dp=3",
                "parallel.etp=3",
                "model.moe.expert_ffn_hidden=12",
                "experts.ranks_per_node=2",
            ),
            "which do not divide into nodes of several ranks: expected all_to_all",
        ),
    ],
)
def test_nodes_that_are_none_are_refused(overrides: tuple[str, ...], words: str) -> None:

    with pytest.raises(ConfigError, match=r"experts\.ranks_per_node") as caught:
        plan(*overrides, HIERARCHICAL)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            (AUTO, "model.moe.num_experts=5"),
            "model.moe.num_experts=5 is not divisible by parallel.ep=2",
        ),
        ((AUTO, "model.moe.num_experts=[4,8,8]"), "has 3 numbers: expected 4, one per MoE layer"),
        (
            ("experts.overlap_chunks=3", "model.moe.num_experts=[8,4,8,16]"),
            ("than the 2 experts per rank with model.moe.num_experts=[8, 4, 8, 16] (4 in layer 1)"),
        ),
    ],
)
def test_numbers_of_experts_are_looked_at_before_bytes(
    overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan("parallel.dp=2", "parallel.ep=2", *overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ranks_of_a_node_are_those_of_the_launcher() -> None:
    config = parse([*BASE, "model.moe.num_experts=16", "parallel.dp=16", "parallel.ep=16"]).config
    assert on_nodes(config, 4) is config
    config = parse([*BASE, HIERARCHICAL]).config
    assert on_nodes(config, 4).experts.ranks_per_node == 4
    named = parse([*BASE, HIERARCHICAL, "experts.ranks_per_node=2"]).config
    assert on_nodes(named, 4).experts.ranks_per_node == 2
    _, layout = plan("parallel.dp=16", "parallel.ep=16", HIERARCHICAL)
    assert layout.ranks_per_node == 8, "parallel.ranks_per_node"


def test_another_layout_whose_experts_are_on_one_rank_has_nothing_of_the_section() -> None:
    config = parse(
        [
            *(
                *BASE,
                "model.moe.num_experts=16",
                "parallel.dp=4",
                "parallel.ep=4",
                "experts.overlap_chunks=2",
            ),
            *("parallel.elastic_layouts.half.dp=2", "parallel.elastic_layouts.half.ep=1"),
        ]
    ).config
    assert resolve(config, 4, None)[0].experts.overlap_chunks == 2
    assert resolve(config, 2, None)[0].experts == ExpertsConfig()
