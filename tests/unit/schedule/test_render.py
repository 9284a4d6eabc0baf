"""Drawings."""

import re
import struct
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from megapipe.schedule.cost import Cost
from megapipe.schedule.data_parallel import ReplicaPolicy
from megapipe.schedule.generators import build, forward_only, names
from megapipe.schedule.placement import loop
from megapipe.schedule.render import draw_rows, png, svg, text
from megapipe.schedule.render.bars import bars
from megapipe.schedule.render.picture import picture
from megapipe.schedule.render.scene import GATHER, IDLE, REDUCE, Polygon, Rectangle, Words, shade
from megapipe.schedule.text import from_csv
from megapipe.schedule.timing.simulate import simulate
from tests.unit.schedule.schedule_cases import schedules

SUMMARY = (
    "time 12; idle 25.0% of the makespan, 33.3% of the ideal time, 25.0% of the longest rank span"
)
SVG = "{http://www.w3.org/2000/svg}"
JOINED = """0F0,1F1,(0F2;1B1)OVERLAP_F_B,1F3,1B3,0B0,0B2
0F1,1F0,(0F3;1B0)OVERLAP_F_B,1F2,1B2,0B1,0B3
"""
"""Two directions in opposite directions, with joined pairs."""
SLICED = "0F0.0,0F0.1,0B0.1,0B0.0\n1F0.0,1F0.1,1B0.1,1B0.0\n"
HALVED = "# sizes 1/2 1/2 1\n0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"
RECOMPUTED = "# recompute 0\n0F0,0F1,0R0,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def rectangles(scene):
    return [shape for shape in scene.shapes if isinstance(shape, Rectangle)]


def operations(scene):
    return [shape for shape in rectangles(scene) if shape.edge == "white"]


def words(scene):
    return [shape.words for shape in scene.shapes if isinstance(shape, Words)]


# text


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


def test_text_of_joined_pairs():
    assert text(from_csv(JOINED)).splitlines()[:3] == [
        "rank 0 F0 F1 F2&B1--- F3 B3--- B0--- B2---",
        "rank 1 F1 F0 F3&B0--- F2 B2--- B1--- B3---",
        "F forward; B backward; number: micro-batch; & as one; . idle",
    ]


def test_text_of_slices():
    assert text(from_csv(SLICED)).splitlines()[:3] == [
        "rank 0 F0.0 F0.1 ...............B0.1----- B0.0-----",
        "rank 1 .....F0.0 F0.1 B0.1----- B0.0----- ..........",
        "F forward; B backward; number: micro-batch.slice; . idle",
    ]


def test_text_of_parts_of_a_micro_batch():
    """A half takes half the columns and still has room for its number."""
    first, second, *_ = text(from_csv(HALVED)).splitlines()
    assert first == "rank 0 F0 F1 F2--- ............B0--- B1--- ......B2---------"
    assert second == "rank 1 ...F0 F1 ...F2--- B0--- B1--- B2--------- ............"


def test_text_of_recomputation():
    first, *_, legend, _ = text(from_csv(RECOMPUTED)).splitlines()
    assert first == "rank 0 F0 F1 R0 ...B0--- ...B1------"
    assert legend.startswith("F forward; B backward; R recomputation; ")


def test_text_names_the_operations_that_cells_belong_to():
    """What is coloured: every character of an operation, half of them for each of a pair."""
    drawing = draw_rows(from_csv(JOINED), width=31)
    runs = [(run.words, str(run.part.op)) for run in drawing.rows[0] if run.part]
    assert runs[:4] == [("F0", "0F0"), ("F1", "1F1"), ("F2&", "0F2"), ("B1", "1B1")]


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


def test_of_a_very_long_schedule_the_ends_are_drawn():
    """What is left out anyway costs no time, and makes no room for its numbers."""
    schedule = build("1f1b", ranks=2, microbatches=2000)
    first, second, *_ = text(schedule, width=60).splitlines()
    assert first == "rank 0 F0---F1---..........---- ... ---------.....B1999-----"
    assert second == "rank 1 .....F0---B0------------ ... ----B1999-----.........."


def test_many_short_operations_between_long_ones_are_not_left_out():
    """The middle is missing only where a mark says so."""
    timeline = simulate(build("1f1b", ranks=1, microbatches=200))
    times = [0, *[1000] * 199, *[2000] * 200, 3000]
    long = {0: "F0", 199: "B99", 399: "B199"}
    drawn = replace(timeline, start_ticks=(times[:-1],), end_ticks=(times[1:],))
    row, *_ = text(drawn, width=40).splitlines()
    assert re.findall(r"[FB]\d+", row) == [*long.values()]


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_bars_of_both_ends_have_whole_pairs(most):
    timeline = simulate(from_csv(JOINED))
    whole = list(bars(timeline, 0))
    ends = list(bars(timeline, 0, most=most))
    assert set(ends) <= set(whole)
    assert ends[0] == whole[0]
    assert ends[-1] == whole[-1]


@settings(max_examples=60)
@given(schedules())
def test_text_shows_every_operation_in_order(schedule):
    rows = text(schedule, width=10**6).splitlines()
    for rank in range(schedule.placement.ranks):
        cells = re.findall(r"([FBIWR])(\d+)(?:\.(\d+))?", rows[rank].removeprefix(f"rank {rank} "))
        assert [(kind, int(mb), int(part or 0)) for kind, mb, part in cells] == [
            (op.kind.name, op.microbatch, op.slice) for op in schedule.rank_ops(rank)
        ]


@pytest.mark.full
@pytest.mark.parametrize("forward", [1, 2, 3, 50])
def test_text_never_shows_a_part_of_a_number(forward):
    """At each rank every kind runs in micro-batch order, so a cut number would break it."""
    timeline = simulate(build("zb_h1", ranks=2, microbatches=30), Cost(F=forward, I=3, W=3))
    for width in range(24, 160):
        for row in text(timeline, width=width).splitlines()[:2]:
            for kind in "FIW":
                numbers = [int(n) for n in re.findall(rf"{kind}(\d+)", row)]
                assert numbers == sorted(set(numbers))


def test_text_of_gathers_and_reductions():
    """They lie below their rank, from the first gather on."""
    schedule = build("breadth_first", ranks=2, microbatches=2)
    cost = Cost.full_rank(schedule.placement, gather=2, reduce=3)
    *rows, legend, _ = text(simulate(schedule, cost), width=80).splitlines()
    assert rows == [
        "rank 0 ......F0aF1aF0bF1b.........B0b---B1b---B0a---B1a---.........",
        "       <0<<<<<2<<<<                           >2>>>>>>>   >0>>>>>>>",
        "rank 1 .........F0aF1aF0bF1bB0b---B1b---B0a---B1a---...............",
        "       <1<<<<<3<<<<                     >3>>>>>>>   >1>>>>>>>",
    ]
    assert legend.endswith("letter: chunk; < gathers a stage; > reduces a stage; . idle")


def test_text_of_runs_and_gathers_on_demand():
    """A rank of two chunks, one of them at a time: the gather of chunk b begins when a has ended,
    and its gradients' reduction comes before the gather that a's backward waits for."""
    schedule = build("breadth_first", ranks=1, microbatches=1, chunks=2)
    timeline = simulate(schedule, Cost(gather=2, reduce=3), ReplicaPolicy(3, 0))
    row, below, *_ = text(timeline, width=100).splitlines()
    assert (row, below) == (
        "rank 0 ........F0a ........F0b B0b---- ....................B0a---- ............",
        "       <0<<<<<<    <1<<<<<<            >1>>>>>>>>>><0<<<<<<        >0>>>>>>>>>>",
    )


# pictures


def test_svg_has_a_box_per_operation_and_its_number():
    schedule = build("interleaved_1f1b", ranks=4, microbatches=8, chunks=2)
    drawing = ElementTree.fromstring(svg(simulate(schedule)))
    boxes = [box for box in drawing.iter(f"{SVG}rect") if box.get("stroke") == "white"]
    assert len(boxes) == 2 * 4 * 8 * 2
    assert len({box.get("fill") for box in boxes}) == 4
    shown = [node.text for node in drawing.iter(f"{SVG}text")]
    assert sum(word == "7" for word in shown) == 2 * 4 * 2
    for word in ("rank 3", "forward", "backward", "dark to pale: chunks 0 to 1", "idle", "time 57"):
        assert word in shown
    assert shown[0].startswith("interleaved_1f1b: 4 ranks, 8 micro-batches, 2 chunks; idle 15.8%")


@pytest.mark.parametrize(("ranks", "microbatches", "bands"), [(4, 8, 1), (16, 64, 2)])
def test_every_number_is_readable_and_boxes_stay_inside_and_apart(ranks, microbatches, bands):
    scene = picture(build("zb_h1", ranks=ranks, microbatches=microbatches))
    assert scene.width < 1800
    rows = {}
    for box in operations(scene):
        assert box.x + box.width <= scene.width
        assert box.y + box.height <= scene.height
        rows.setdefault(box.y, []).append((box.x, box.x + box.width))
    assert len(rows) == bands * ranks
    for spans in rows.values():
        assert all(end <= start + 0.01 for (_, end), (start, _) in pairwise(spans))
    numbers = [s for s in scene.shapes if isinstance(s, Words) and s.anchor == "middle"]
    numbers = [s for s in numbers if s.colour == "#222222"]
    assert len(numbers) == 3 * ranks * microbatches
    assert min(number.size for number in numbers) >= 7


def test_a_cut_operation_is_in_both_bands_and_has_one_number():
    timeline = simulate(build("1f1b", ranks=2, microbatches=100))
    scene = picture(timeline, width=700)
    lengths = {round(box.width, 2) for box in operations(scene)}
    assert len(operations(scene)) > 2 * 2 * 100
    assert len(lengths) == 2  # F, as long as a half of B; B
    for number in range(100):
        assert words(scene).count(str(number)) - (number % 50 == 0) * 1 in (3, 4, 5)


def test_idle_time_is_what_boxes_leave_of_a_row():
    scene = picture(build("1f1b", ranks=2, microbatches=3))
    idle = [box for box in rectangles(scene) if box.fill == IDLE and box.height == 26]
    assert [box.width for box in idle] == [12 * 26, 12 * 26]
    assert sum(box.width for box in operations(scene)) == 2 * 9 * 26


def test_gathers_and_reductions_lie_below_the_operations_of_their_rank():
    timeline = simulate(build("1f1b", ranks=2, microbatches=3), Cost(reduce=(1, 2), gather=3))
    scene, plain = picture(timeline), picture(build("1f1b", ranks=2, microbatches=3))
    lines = [box for box in rectangles(scene) if box.fill == IDLE and box.height == 26]
    unit = 26 / 1
    for fill, intervals in ((GATHER, timeline.gathers), (REDUCE, timeline.reductions)):
        strips = [box for box in rectangles(scene) if box.fill == fill and box.edge == "white"]
        assert [(box.x - 64, box.width) for box in strips] == [
            (each.start * unit, (each.end - each.start) * unit) for each in intervals
        ]
        assert [box.y for box in strips] == [lines[each.rank].y + 27 for each in intervals]
    assert lines[1].y >= lines[0].y + 27 + strips[0].height
    assert {"parameters gathered", "gradients reduced"} <= set(words(scene)) - set(words(plain))


def test_joined_pairs_share_a_box_and_replicas_are_hatched():
    scene = picture(from_csv(JOINED))
    boxes = operations(scene)
    assert len(boxes) == 16
    halves = [box for box in boxes if box.height == 13]
    upper, lower = halves[:2]
    assert (lower.x, lower.y, lower.width) == (upper.x, upper.y + 13, 39)
    assert [box.fill for box in halves] == [shade(0, 0, 1), shade(1, 0, 1)] * 2
    assert sum(box.hatch == 1 for box in boxes) == 8
    assert {"direction 0", "direction 1"} <= set(words(scene))
    assert svg(from_csv(JOINED)).count("url(#hatch1)") == 8 + 1


def test_slices_and_parts_in_a_picture():
    sliced, halved = picture(from_csv(SLICED)), picture(from_csv(HALVED))
    assert words(sliced).count("0.1") == 4
    assert words(sliced)[0].startswith("csv: 2 ranks, 1 micro-batches, 2 slices; idle 33.3%")
    assert words(halved)[0].startswith("csv: 2 ranks, 2 micro-batches; idle")
    assert {box.width for box in operations(halved)} == {13, 26, 52}


def test_activations_are_drawn_to_one_scale():
    scene = picture(build("1f1b", ranks=2, microbatches=3))
    first, second = (shape for shape in scene.shapes if isinstance(shape, Polygon))
    assert [word for word in words(scene) if word.startswith("max")] == ["max 2", "max 1"]
    heights = [[first.points[0][1] - y for _, y in first.points]]
    heights.append([second.points[0][1] - y for _, y in second.points])
    assert [max(each) for each in heights] == [17, 8.5]
    steps = [(x - 64) / 26 for (x, y), (_, after) in pairwise(first.points) if after != y]
    assert steps == [0, 1, 9, 12]  # F0, F1; the end of B0 is the start of F2; B1, B2
    assert first.points[-1] == (64 + 12 * 26, first.points[0][1])


def test_a_forward_only_schedule_holds_nothing():
    scene = picture(forward_only(loop(2), 3))
    assert not [shape for shape in scene.shapes if isinstance(shape, Polygon)]
    assert not [word for word in words(scene) if "activations" in word]


def test_shades_of_a_kind_are_apart():
    assert [shade(0, chunk, 3) for chunk in range(3)] == ["#6a99d6", "#97b8e2", "#c3d6ef"]


def test_ticks_are_round_and_leave_room_for_the_end():
    timeline = simulate(
        build("1f1b", ranks=2, microbatches=3), Cost(1, 1, 1, latency=Fraction(1, 2))
    )
    grey = [s for s in picture(timeline).shapes if isinstance(s, Words) and s.colour != "#222222"]
    assert [tick.words for tick in grey[:-1]] == ["0", "5", "10"]
    assert "time 14" in words(picture(timeline))


def test_svg_escapes_names():
    schedule = forward_only(loop(1), 1)
    named = type(schedule)("<a&b>", schedule.placement, 1, schedule.ops, forward_only=True)
    assert "&lt;a&amp;b&gt;" in svg(named)
    ElementTree.fromstring(svg(named))


@pytest.mark.parametrize("name", names())
def test_every_schedule_can_be_drawn(name):
    schedule = build(name, ranks=4, microbatches=16)
    ElementTree.fromstring(svg(schedule))
    boxes = operations(picture(schedule, width=10**5))
    assert len(boxes) == sum(map(len, schedule.ops))


@pytest.mark.full
def test_png_is_the_same_picture(tmp_path):
    from matplotlib.image import imread

    schedule = from_csv(JOINED)
    scene = picture(schedule)
    path = tmp_path / "x.png"
    png(schedule, path, dpi=100)
    assert struct.unpack(">II", path.read_bytes()[16:24]) == (
        round(scene.width),
        round(scene.height),
    )
    pixels = imread(path)
    for box in operations(scene):
        if not box.hatch:
            column, row = round(box.x + 3), round(box.y + 3)
            colour = "#" + "".join(f"{round(255 * part):02x}" for part in pixels[row, column, :3])
            assert colour == box.fill


@pytest.mark.full
def test_a_picture_too_large_for_numbers_is_one_band():
    scene = picture(build("zb_h1", ranks=64, microbatches=128))
    lines = [box for box in rectangles(scene) if box.fill == IDLE and box.height == 19]
    assert len(lines) == 64
    assert scene.width < 1800
    assert not operations(scene)  # no white edge would be left of them
    assert len(rectangles(scene)) == 64 + 64 * 128 * 3 + 4
