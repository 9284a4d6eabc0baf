"""Ways to attend over split positions, compared and drawn."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.config.context import ALGORITHMS, ContextConfig
from megapipe.config.unused_keys import check_effects
from megapipe.context.tensors import RingTensor, RingTensors
from megapipe.errors import ConfigError
from megapipe.layout.context_checks import check_context, split_of
from megapipe.layout.context_plan import PASSES
from megapipe.layout.model_spec import model_spec_of
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import Speeds
from megapipe.plan.activation_memory import peak_activations
from megapipe.plan.cache import Cache
from megapipe.plan.commands import main
from megapipe.plan.context_options import (
    Attention,
    ContextCost,
    CpTopology,
    bytes_sent,
    cost_of,
    costs,
)
from megapipe.plan.memory_fit import size_text
from megapipe.plan.report import report
from megapipe.plan.units import Units
from megapipe.schedule.memory import peak_held

ROOT = Path(__file__).parents[3]

LONG = (
    "model.heads=32",
    "model.kv_heads=8",
    "model.hidden=4096",
    "model.layers=2",
    "model.positions=rotary",
    "model.vocab_size=300",
    "model.dtype=bf16",
    "train.sequence_length=16384",
    "train.microbatch=1",
    "plan.device=H100",
)


def config(*keys: str) -> Config:
    return resolve(parse([*LONG, *keys]).config, None, None)[0]


def found(*keys: str) -> list[ContextCost]:
    given = config(*keys)
    return costs(given, Speeds.of(given))


def test_all_that_is_legal_is_there_once() -> None:
    rows = found("parallel.cp=8")
    sections = [cost.context.model_dump_json() for cost in rows]
    assert len(set(sections)) == len(sections)
    assert {cost.context.algorithm for cost in rows} == {
        *("ring", "double_ring", "helpers", "teams", "all_gather")
    }
    assert {cost.context.ulysses for cost in rows} == {1, 2, 4, 8}
    assert rows == sorted(rows, key=lambda cost: cost.seconds)
    for cost in rows:  # what is listed can be configured
        made = resolve(parse([*LONG, "parallel.cp=8", *cost.keys]).config, None, None)[0]
        assert made.context == cost.context


def test_what_is_there_is_all_that_is_legal() -> None:
    given = config("parallel.cp=8")
    legal = set()
    orders, ranks = ("zigzag", "striped", "contiguous"), ("heads_first", "context_first")
    for plan, order, ulysses, first, inner, team in itertools.product(
        ALGORITHMS, orders, range(1, 9), ranks, (None, 2, 4), (None, 2)
    ):
        values = {
            "algorithm": plan,
            "position_split": order,
            "ulysses": ulysses,
            "rank_order": first,
        }
        own = ContextConfig.model_validate({**values, "inner_ring_size": inner, "team_size": team})
        made = given.model_copy(update={"context": own})
        try:
            split = split_of(made)
            check_effects(made, "context")
            check_context(made, split, 1, model_spec_of(made).kernel_needs.attention)
        except ConfigError:
            continue
        legal.add(own.model_dump_json())
    assert legal == {cost.context.model_dump_json() for cost in found("parallel.cp=8")}


def test_bytes_within_nodes_and_between() -> None:
    """Two nodes of two: a flat ring crosses once per round, Ulysses with heads first does not."""
    given = ("parallel.cp=4", "parallel.ranks_per_node=2")
    block = 16384 // 4 * 8 * 128 * 2  # keys of a rank: values of K and V
    forward, backward = block * 2, block * (2 + 4)
    ring = cost_of(config(*given), Speeds.of(config(*given)))
    assert (ring.intra_node_bytes, ring.inter_node_bytes) == (3 * (forward + backward),) * 2
    own = config(*given, "context.ulysses=2")
    usp = cost_of(own, Speeds.of(own))
    assert usp.inter_node_bytes == forward + backward
    heads = 2 * (32 + 8) * 128 * 2 * 16384 // 4
    assert usp.intra_node_bytes == 2 * heads // 2
    turned = config(*given, "context.ulysses=2", "context.rank_order=context_first")
    other = cost_of(turned, Speeds.of(turned))
    assert (other.intra_node_bytes, other.inter_node_bytes) == (
        usp.inter_node_bytes,
        usp.intra_node_bytes,
    )


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("context.backward_circulates=queries",),
        ("context.algorithm=all_gather",),
        ("context.algorithm=double_ring", "context.inner_ring_size=2"),
        ("context.algorithm=teams", "context.team_size=2"),
        ("context.algorithm=helpers", "context.position_split=contiguous"),
        ("context.ulysses=2",),
        ("context.ulysses=4",),
    ],
)
def test_bytes_are_those_of_a_run(keys: tuple[str, ...]) -> None:
    """The bytes are those of one layer, on the first and the last rank."""
    for found, run in both_ways(keys, None):
        assert found == run


def both_ways(keys: tuple[str, ...], folders: list[Path] | None) -> Iterator[tuple[int, Fraction]]:
    """Count what two ranks send in the forward and the backward of one layer: by the choice of a
    way to attend, and in a run, which may be kept in `folders`."""
    more = ("parallel.cp=4", "model.layers=1", "train.sequence_length=64")
    given, layout = resolve(parse([*LONG, *more, *keys]).config, None, None)
    units, own = Units(given, layout, Cache(folders)), Attention.of(given)
    for index, what in itertools.product((0, 3), PASSES):
        (unit,) = units.of(0, index=index)
        sent = [e.wire for e in unit.transfers(what) if e.axis in ("cp", "ulysses")]
        by_choice = sum(size for _, size in bytes_sent(own, CpTopology(given), what, index))
        yield by_choice, sum(sent, Fraction())


def test_tensors_of_messages_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are described as narrow ones are so in a run, too."""
    carried, keys = RingTensors.carried, ("context.backward_circulates=keys",)
    before = list(both_ways(keys, []))

    def narrow(*args: Any, **kwargs: Any) -> tuple[RingTensor, ...]:
        return tuple(tensor._replace(main=False) for tensor in carried(*args, **kwargs))

    monkeypatch.setattr(RingTensors, "carried", narrow)
    after = list(both_ways(keys, []))
    assert all(found == run for found, run in after)
    # keys in the forward, and with gradients of the same type in the backward: twice, not thrice
    (forward, _), (backward, _) = after[:2]
    assert backward == 2 * forward
    assert before[0][0] == forward
    assert before[1][0] == 3 * forward


def test_slow_links_change_the_order() -> None:
    """With heads split within nodes and keys between them less time is exposed."""
    keys = ("parallel.cp=8", "parallel.ranks_per_node=4", "plan.inter_node_gb_s=1")
    best = found(*keys)[0].context
    assert best.ulysses == 4
    assert best.rank_order == "heads_first"
    slowest = found(*keys)[-1]
    assert sum(slowest.exposed.values()) > 0.5 * slowest.seconds


def test_a_ring_is_as_slow_as_the_slowest_of_those_beside_it() -> None:
    """Three rings of two ranks. On nodes of 4 the hop of the first stays within one and those of
    the others cross, as all do on nodes of 3; what else differs is where heads are exchanged."""
    sizes = ("model.heads=24", "model.kv_heads=6", "model.hidden=3072")
    given = ("parallel.cp=6", "context.ulysses=3", "train.sequence_length=12288", *sizes)
    given += ("plan.intra_node_gb_s=300",)
    heads = 2 * (24 + 6) * 128 * 2 * 12288 // 6
    sent = heads * 2 // 3  # to the two others who split them

    def of_rings(per_node: int, gb_s: float) -> dict[str, float]:
        own = config(*given, "plan.inter_node_gb_s=0.5", f"parallel.ranks_per_node={per_node}")
        exposed = cost_of(own, Speeds.of(own)).exposed
        return {what: seconds - sent / gb_s / 1e9 for what, seconds in exposed.items()}

    assert of_rings(4, gb_s=0.5) == pytest.approx(of_rings(3, gb_s=300))
    within = of_rings(6, gb_s=300)
    assert all(seconds > 100 * abs(within[what]) for what, seconds in of_rings(3, 300).items())


def test_rounds_work_and_bundles() -> None:
    """Work is that of the slowest of each round, over what a rank has on average."""

    def row(*keys: str) -> tuple[int, float, int]:
        own = config("parallel.cp=4", *keys)
        cost = cost_of(own, Speeds.of(own))
        return cost.rounds, cost.work, cost.bundles

    assert row() == (4, pytest.approx(1.0, abs=0.01), 3)
    # 4 rounds of a whole block, and 2.5 blocks on average: (2n - 1) / n at any length
    assert row("context.position_split=contiguous") == (4, pytest.approx(7 / 4, abs=0.01), 3)
    helpers = ("context.algorithm=helpers", "context.position_split=contiguous")
    assert row(*helpers)[::2] == (3, 3)
    assert row("context.algorithm=all_gather") == (4, pytest.approx(1.0, abs=0.01), 4)
    assert row("context.algorithm=double_ring", "context.inner_ring_size=2")[0] == 4
    assert row("context.algorithm=teams", "context.team_size=2")[0] == 4


def test_models_that_cannot() -> None:
    given = config()
    windows = given.model_copy(
        update={
            "model": given.model.model_copy(update={"sliding_window": 4}),
            "parallel": given.parallel.model_copy(update={"cp": 2}),
        }
    )
    with pytest.raises(ConfigError, match=r"parallel\.cp=2 needs model\.sliding_window="):
        costs(windows, Speeds.of(given))


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *LONG, "parallel.cp=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["algorithm", "position_split", "ulysses"]
    assert any(line.startswith("ring") for line in lines)
    assert lines[-1].startswith("fastest: ")
    assert "this configuration: number " in lines[-1]


def test_other_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--json", *LONG, "parallel.cp=2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["compare", "--csv", *LONG, "parallel.cp=2"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["algorithm"] for row in rows] == [row["algorithm"] for row in told]
    assert float(rows[0]["seconds"]) == told[0]["seconds"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["compare", *LONG], "parallel.cp=1 splits no positions"),
        (
            ["compare", "parallel.cp=2", "plan.device=null", "parallel.device=cuda"],
            "the speed of the device is not known",
        ),
        (["draw", *LONG, "parallel.cp=2", "-o", "/nowhere/x.svg"], "-o /nowhere/x.svg: No such"),
        (
            ["draw", *LONG, "parallel.cp=2", "context.algorithm=helpers"],
            "context.position_split=zigzag",
        ),
        (["draw", *LONG, "parallel.cp=3"], "train.sequence_length=16384 is not divisible by 6"),
        (["compare", *LONG, "parallel.cp=1024"], "is a ring of 1024 ranks: expected at most 512"),
        (["draw", "dance", "parallel.cp=2"], "dance: no such file"),
        (["draw", *LONG, "parallel.cp=2", "context.plans=ring"], "unknown key"),
    ],
)
def test_bad_input(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megapipe.layout.speeds.local_device", lambda: None)
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said


def test_a_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("parallel.cp=3", "context.algorithm=helpers", "context.position_split=contiguous")
    length = "train.sequence_length=12288"
    assert main(["draw", *LONG, *keys, length]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "helpers, contiguous: 3 ranks, 2 rounds",
        "        round 0  round 1",
        "rank 0  0:0      2:0",
        "rank 1  1:1      1:0",
        "rank 2  2:2      2:1",
        (
            "3 shards and 1 result sent; a rank has at most 2 KV and 2 query shards in "
            "memory, including its own"
        ),
    ]
    assert (
        main(["draw", *LONG, "parallel.cp=2", "context.backward_circulates=queries", "--backward"])
        == 0
    )
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "ring, queries travel, zigzag: 2 ranks, 2 rounds"
    assert last.startswith("2 shards and 2 gradients sent; a rank has at most 1 KV and 2 query ")
    out = tmp_path / "plan.svg"
    assert main(["draw", *LONG, *keys, length, "--backward", "-o", str(out)]) == 0
    drawn = out.read_text()
    assert drawn.startswith("<svg")
    assert ">2:1</text>" in drawn


def test_memory_of_the_page() -> None:
    """What docs/context.md says of a GPU of llama_8b_128k.yaml is what --dry-run prints."""
    page = " ".join((ROOT / "docs/context.md").read_text().split())
    given, layout = resolve(parse([str(ROOT / "configs/llama_8b_128k.yaml")]).config, None, None)
    text = report(given, layout)
    (told,) = re.findall(r"^memory +at most, per process: (.*)$", text, re.MULTILINE)
    (total,) = re.findall(r"^total +([\d.]+ GB)", text, re.MULTILINE)
    for part in [*told.split(", "), f"total {total}"]:
        what, amount, unit = part.rsplit(" ", 2)
        assert re.search(rf"\| {what} \| [^|]+ \| {amount} {unit} \|", page), part
    (stored,) = re.findall(r"not stored \(they would take (.*) per layer\)", text)
    assert f"if they were stored, would be {stored}, s^2 / n. None are" in page

    kept = layout.local_length * (2 * 2 * given.model.hidden + 4 * given.model.heads)
    pieces = max(peak_held(layout.schedule)) * layout.chunks
    held = int(pieces) * 8 * kept
    most = peak_activations(Units(given, layout), 0)
    assert peak_activations(Units(given, layout), 0, inside=False).device == held
    for words in (
        f"at most {pieces} work items of 8 layers, {size_text(8 * kept)} each: {size_text(held)}",
        f"The other {size_text(most.device - held)} are",
    ):
        assert words in page, words


PICTURES: dict[str, tuple[str, ...]] = {
    "ring": (),
    "contiguous": ("context.position_split=contiguous",),
    "helpers": ("context.algorithm=helpers", "context.position_split=contiguous"),
    "double_ring": ("context.algorithm=double_ring", "context.inner_ring_size=2"),
    "teams": ("context.algorithm=teams", "context.team_size=2"),
}
"""What docs/context_NAME.svg shows, of four ranks."""


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_the_page(name: str, tmp_path: Path) -> None:
    docs, out = ROOT / "docs", tmp_path / "x.svg"
    assert f"(context_{name}.svg)" in (docs / "context.md").read_text()
    assert main(["draw", "parallel.cp=4", *PICTURES[name], "-o", str(out)]) == 0
    assert out.read_text() == (docs / f"context_{name}.svg").read_text()
