"""Drawings."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from schedule_cases import schedules

from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build, forward_only
from megapipe.schedule.placement import loop
from megapipe.schedule.render import svg, text
from megapipe.schedule.simulate import simulate

SUMMARY = (
    "time 12; idle 25.0% of the makespan, 33.3% of the ideal time, 25.0% of the longest rank span"
)
SVG = "{http://www.w3.org/2000/svg}"


def test_text_of_1f1b():
    assert text(build("1f1b", ranks=2, microbatches=3)).splitlines() == [
        "rank 0 F0 F1 ......B0--- F2 B1--- ...B2---",
        "rank 1 ...F0 B0--- F1 B1--- F2 B2--- ......",
        "F forward; B backward; number: micro-batch; . idle",
        SUMMARY,
    ]


def test_text_tells_chunks_apart():
    first, *_ = text(build("gpipe", ranks=1, microbatches=1, chunks=2)).splitlines()
    assert first == "rank 0 F0a F0b B0b---- B0a----"


@pytest.mark.parametrize("width", [60, 100, 160])
def test_a_long_text_is_cut_in_the_middle(width):
    drawing = text(build("zb_h1", ranks=8, microbatches=64), width=width).splitlines()
    rows = drawing[:8]
    assert all(len(row) <= width for row in rows)
    assert all(" ... " in row for row in rows)
    assert len({row.index(" ... ") for row in rows}) == 1
    assert rows[0].startswith("rank 0 F0-F1-F2-")
    assert rows[0].endswith("W63")
    assert "... left out" in drawing[8]


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_text_shows_every_operation_in_order(schedule):
    rows = text(schedule, width=10**6).splitlines()
    for rank in range(schedule.placement.ranks):
        cells = re.findall(r"([FBIW])(\d+)", rows[rank].removeprefix(f"rank {rank} "))
        assert [(kind, int(mb)) for kind, mb in cells] == [
            (op.kind.name, op.microbatch) for op in schedule.rank_ops(rank)
        ]


@pytest.mark.parametrize("forward", [1, 2, 3, 50])
def test_text_never_shows_a_part_of_a_number(forward):
    """At each rank every kind runs in micro-batch order, so a cut number would break it."""
    timeline = simulate(build("zb_h1", ranks=2, microbatches=30), Cost(F=forward, I=3, W=3))
    for width in range(24, 160):
        for row in text(timeline, width=width).splitlines()[:2]:
            for kind in "FIW":
                numbers = [int(n) for n in re.findall(rf"{kind}(\d+)", row)]
                assert numbers == sorted(set(numbers))


def test_svg_has_a_box_per_operation_and_its_number():
    schedule = build("interleaved_1f1b", ranks=4, microbatches=8, chunks=2)
    drawing = ElementTree.fromstring(svg(simulate(schedule)))
    boxes = [box for box in drawing.iter(f"{SVG}rect") if box.get("stroke") == "white"]
    assert len(boxes) == 2 * 4 * 8 * 2
    assert len({box.get("fill") for box in boxes}) == 4
    words = [node.text for node in drawing.iter(f"{SVG}text")]
    assert sum(word == "7" for word in words) == 2 * 4 * 2
    for word in ("rank 3", "forward, chunk 1", "backward, chunk 0", "idle", "time 57"):
        assert word in words
    assert words[0].startswith("interleaved_1f1b: 4 ranks, 8 micro-batches, 2 chunks; idle 15.8%")


def test_svg_boxes_stay_inside_and_apart():
    drawing = ElementTree.fromstring(svg(build("zb_h1", ranks=16, microbatches=64)))
    width, height = float(drawing.get("width")), float(drawing.get("height"))
    rows = {}
    for box in drawing.iter(f"{SVG}rect"):
        if box.get("stroke") == "white":
            x, wide = float(box.get("x")), float(box.get("width"))
            assert x + wide <= width
            assert float(box.get("y")) + float(box.get("height")) <= height
            rows.setdefault(box.get("y"), []).append((x, x + wide))
    assert len(rows) == 16
    for spans in rows.values():
        assert all(end <= start + 0.02 for (_, end), (start, _) in pairwise(spans))


def test_svg_escapes_names():
    schedule = forward_only(loop(1), 1)
    named = type(schedule)("<a&b>", schedule.placement, 1, schedule.ops, forward_only=True)
    assert "&lt;a&amp;b&gt;" in svg(named)
    ElementTree.fromstring(svg(named))
