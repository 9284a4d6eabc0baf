"""When messages go in shares: as the speeds of links say."""

from __future__ import annotations

import pytest

from megapipe.cli import parse
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve
from megapipe.plan.traffic import step_traffic
from megapipe.plan.units import Units

TWO_NODES = ("parallel.tp=4", "parallel.pp=4", "train.global_batch=16")


def decided(*keys: str) -> bool:
    return resolve(parse(list(keys)).config, None, None)[1].scatters


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), True),
        (("pipeline.scatter_gather=off",), False),
        (("parallel.ranks_per_node=16",), False),  # all in one node
        (("parallel.ranks_per_node=16", "pipeline.scatter_gather=on"), True),
        (("parallel.ranks_per_node=6",), False),  # tp ranks in two nodes
        (("plan.inter_node_gb_s=300",), False),  # no slower than within a node
        (("parallel.sequence_parallel=true",), False),
        (("parallel.tp=1", "parallel.dp=4"), False),
        (("pipeline.transport=in_process",), False),
    ],
)
def test_auto_is_on_where_the_gather_is_faster(keys: tuple[str, ...], expected: bool) -> None:
    assert decided(*TWO_NODES, *keys) == expected


@pytest.mark.parametrize(
    "key",
    [
        "parallel.pp=1",
        "parallel.tp=1",
        "parallel.sequence_parallel=true",
        "pipeline.transport=in_process",
    ],
)
def test_on_is_refused_where_there_is_nothing_to_share(key: str) -> None:
    with pytest.raises(ConfigError, match=r"scatter_gather=on needs parallel\.pp and"):
        decided(*TWO_NODES, "pipeline.scatter_gather=on", key)


def test_a_share_goes_over_the_pipeline_and_all_of_them_over_tp() -> None:
    """A middle rank: 2 micro-batches of 3 rows and 5 positions, hidden 12, on 4 tp ranks."""
    keys = ("model.hidden=12", "model.layers=4", "train.sequence_length=5", "train.microbatch=3")
    keys = (*TWO_NODES, *keys, "train.global_batch=6", "model.heads=4", "model.head_dim=4")
    sent = {}
    for chosen in ("on", "off"):
        config, layout = resolve(
            parse([*keys, f"pipeline.scatter_gather={chosen}"]).config, None, None
        )
        sent[chosen] = {(e.axis, e.what): e for e in step_traffic(Units(config, layout), 1)}
    whole = 2 * 3 * 5 * 12 * 4
    for to in ("to 0", "to 2"):
        assert (sent["off"]["pp", to].count, sent["off"]["pp", to].bytes) == (2, whole)
        assert (sent["on"]["pp", to].count, sent["on"]["pp", to].bytes) == (2, whole / 4)
    gathers = sent["on"]["tp", "messages"]
    assert (gathers.count, gathers.bytes, gathers.members) == (4, 2 * whole, 4)
    assert ("tp", "messages") not in sent["off"]
