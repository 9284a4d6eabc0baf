"""What several keys decide together: defaults filled in."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.cli import dump, parse
from megapipe.config.config import Config
from megapipe.errors import ConfigError, MegapipeError
from megapipe.layout.checks import shortened
from megapipe.layout.resolve import resolve
from megapipe.layout.slice_search import balanced_slices
from megapipe.model.partition import format_layout
from megapipe.plan.measurements import BY_UNITS
from megapipe.schedule.generators import build
from megapipe.schedule.ir import Kind
from megapipe.schedule.memory import peak_held
from megapipe.schedule.placement import Placement, loop, vee, wave
from megapipe.schedule.text import to_csv

BASE = ("model.layers=8", "model.heads=8", "model.hidden=64", "train.global_batch=48")


def configure(*overrides: str) -> Config:
    return parse([*BASE, *overrides]).config


def test_resolved() -> None:
    config, layout = resolve(
        configure("parallel.tp=2", "parallel.pp=2", "train.sequence_length=32"), 16, 257
    )
    assert config.parallel.dp == layout.dp == 4
    assert (layout.tp, layout.pp, layout.cp, layout.chunks) == (2, 2, 1, 1)
    assert (layout.world, layout.stages, layout.microbatches) == (16, 2, 3)
    model = config.model
    assert (model.kv_heads, model.head_dim, model.ffn_hidden) == (8, 8, 256)
    assert (model.vocab_size, model.max_positions) == (257, 32)
    assert [layer for spec in layout.stage_layers for layer in spec.layers] == list(range(8))
    assert resolve(config, 16, 257) == (config, layout), "resolving again changes nothing"


def test_resolved_config_is_a_valid_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    config, _ = resolve(configure(), 1, None)
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    path.write_text(dump(config))
    assert parse([str(path)]).config == config


def test_without_a_launcher_the_world_is_what_the_layout_needs() -> None:
    _, layout = resolve(configure("parallel.tp=2", "parallel.pp=4"), None, 257)
    assert (layout.dp, layout.world) == (1, 8)
    _, layout = resolve(configure("parallel.tp=2", "parallel.pp=4", "parallel.dp=3"), None, 257)
    assert (layout.dp, layout.world) == (3, 24)


def test_a_plan_is_for_a_given_number_of_processes() -> None:
    """A launcher's number counts instead, and a stored configuration has only dp."""
    given = configure("parallel.tp=2", "parallel.pp=4", "plan.gpus=24")
    for world, dp in ((None, 3), (8, 1)):
        config, layout = resolve(given, world, 257)
        assert (layout.dp, layout.world) == (dp, 8 * dp)
        assert (config.parallel.dp, config.plan.gpus) == (dp, None)
        assert resolve(config, None, 257) == (config, layout)


def test_in_process_pipeline_ranks_are_no_processes() -> None:
    overrides = ("parallel.pp=4", "parallel.tp=2", "pipeline.transport=in_process")
    _, layout = resolve(configure(*overrides), 4, 257)
    assert (layout.dp, layout.pp, layout.world) == (2, 4, 4)


def test_vocabulary() -> None:
    assert resolve(configure(), 1, None)[0].model.vocab_size == 257
    assert resolve(configure("model.vocab_size=300"), 1, 257)[0].model.vocab_size == 300
    later = configure("data.tokenizer=some/where", "parallel.pp=2")
    config, layout = resolve(later, 2, None)
    assert config.model.vocab_size is None
    assert layout.stages == 2
    assert resolve(config, 2, 50257)[0].model.vocab_size == 50257


@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        (("parallel.pp=4",), "E L*2 | L*2 | L*2 | L*2 H"),
        (("parallel.pp=4", "model.vocab_size=20000"), "E L*2 | L*3 | L*3 | H"),
        (("parallel.pp=2", "pipeline.stage_layout=[3, 5]"), "E L*3 | L*5 H"),
        (("parallel.pp=2", "pipeline.stage_layout=ELL|LLLLLLH"), "E L*2 | L*6 H"),
        (
            ("parallel.pp=2", "pipeline.chunks=2", "pipeline.schedule=interleaved_1f1b"),
            "E L*2 | L*2 | L*2 | L*2 H",
        ),
    ],
)
def test_partition(overrides: tuple[str, ...], layout: str) -> None:
    assert format_layout(resolve(configure(*overrides), None, None)[1].stage_layers) == layout


@pytest.mark.parametrize(
    ("overrides", "stages", "chunks"),
    [
        ((), 2, 1),
        (("pipeline.schedule=interleaved_1f1b",), 4, 2),
        (("pipeline.schedule=interleaved_1f1b", "pipeline.chunks=3"), 6, 3),
        (("pipeline.schedule=hanayo",), 4, 2),
        (("pipeline.schedule=chimera",), 2, 1),
    ],
)
def test_the_schedule_decides_the_stages(
    overrides: tuple[str, ...], stages: int, chunks: int
) -> None:
    config, layout = resolve(configure("parallel.pp=2", *overrides), None, None)
    pipeline = config.pipeline
    assert (layout.stages, layout.chunks) == (stages, chunks)
    assert layout.schedule == build(
        pipeline.schedule, ranks=2, microbatches=12, chunks=pipeline.chunks
    )


def test_chunks_are_those_of_the_fullest_rank() -> None:
    """Five stages on two ranks."""
    _, layout = resolve(configure("parallel.pp=2"), None, None)
    five = replace(layout, stage_layers=layout.stage_layers[:1] * 5)
    assert five.chunks == 3


def test_slices_take_equal_flops() -> None:
    overrides = ["parallel.pp=2", "train.global_batch=8", "pipeline.schedule=seq1f1b"]
    _, layout = resolve(configure(*overrides, "pipeline.sequence_slices=3"), None, None)
    assert layout.slice_lengths == balanced_slices(layout.model.causal_flops, 256, 3)
    assert sum(layout.slice_lengths) == 256
    assert (layout.microbatches, layout.schedule.slices) == (2, 3)
    overrides += ["pipeline.sequence_slices=3", "parallel.tp=4", "parallel.sequence_parallel=true"]
    _, layout = resolve(configure(*overrides), None, None)
    assert layout.slice_lengths == balanced_slices(layout.model.causal_flops, 256, 3, 4)
    assert not any(length % 4 for length in layout.slice_lengths)
    assert resolve(configure("parallel.pp=2"), None, None)[1].slice_lengths == (256,)


def test_micro_batches_are_counted_whole() -> None:
    halving = "pipeline.schedule=chimera_backward_halving"
    _, layout = resolve(configure("parallel.pp=2", halving), None, None)
    assert (layout.microbatches, layout.schedule.microbatches) == (12, 24)


def test_a_stage_on_all_ranks_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [
        f"{stage}{kind}{m}"
        for m in range(12)
        for kind, stages in (("F", (0, 1)), ("B", (1, 0)))
        for stage in stages
    ]
    rows = [[cell for cell in cells if cell[0] == "0" or rank == 1] for rank in (0, 1)]
    text = "\n".join(["# spanning 0", *map(",".join, rows)])
    (tmp_path / "spanning.csv").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"spanning.csv: .* stage 0 spans all ranks; .* trained"):
        resolve(configure("parallel.pp=2", "pipeline.schedule=spanning.csv"), None, None)


def test_a_schedule_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = build("1f1b", ranks=2, microbatches=12)
    (tmp_path / "own.csv").write_text(to_csv(ours))
    (tmp_path / "own_schedules.py").write_text(
        "from megapipe.schedule.generators import gpipe_on\n"
        "from megapipe.schedule.placement import vee\n"
        "def up_and_down(ranks, microbatches):\n"
        "    return gpipe_on(vee(ranks), microbatches)\n"
    )
    monkeypatch.chdir(tmp_path)
    _, layout = resolve(configure("parallel.pp=2", "pipeline.schedule=own.csv"), None, None)
    assert layout.schedule.ops == ours.ops
    own = "pipeline.schedule=own_schedules:up_and_down"
    _, layout = resolve(configure("parallel.pp=2", own), None, None, measure=BY_UNITS)
    assert layout.schedule.placement == vee(2)
    assert (layout.stages, layout.chunks) == (4, 2)


INVALID = """
import sys
from dataclasses import replace
from megapipe.schedule.generators import build
from megapipe.schedule.ir import packed

def swapped(ranks, microbatches, cost=None):
    schedule = build("1f1b", ranks=ranks, microbatches=microbatches)
    first, *rest = (packed(reversed(ops)) for ops in schedule.ops)
    return replace(schedule, ops=(first, *rest), activation_bound=None)

def unknown(ranks, microbatches):
    schedule = build("1f1b", ranks=ranks, microbatches=microbatches)
    return replace(schedule, ops=(packed([9, -1]),) * ranks)

def unpacked(ranks, microbatches):
    schedule = build("1f1b", ranks=ranks, microbatches=microbatches)
    return replace(schedule, ops=tuple(schedule.rank_ops(rank) for rank in range(ranks)))
"""


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("invalid:swapped", "rank 0, op 0 (0B11): it needs 0F11 first"),
        ("invalid:unknown", "schedule 1f1b: rank 0, op 0"),
        ("invalid:unpacked", "its `ops` must be arrays of packed operations"),
        ("invalid.csv", "is missing from its list"),
    ],
)
def test_a_schedule_of_one_s_own_is_proved_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, words: str
) -> None:
    (tmp_path / "invalid.py").write_text(INVALID)
    short = to_csv(build("1f1b", ranks=2, microbatches=12)).rpartition(",")[0] + "\n"
    (tmp_path / "invalid.csv").write_text(short)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "invalid", raising=False)
    given = configure("parallel.pp=2", f"pipeline.schedule={spec}", "pipeline.activation_limit=12")
    with pytest.raises(ConfigError) as raised:
        resolve(given, None, None)
    assert str(raised.value).startswith(f"configuration: pipeline.schedule={spec}: ")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_error_ends_the_process_with_a_documented_code() -> None:
    with pytest.raises(MegapipeError) as caught:
        resolve(configure("pipeline.schedule=none_such"), None, None)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("settings", "placement"),
    [
        (("pipeline.placement=loop",), loop(2)),
        (("pipeline.placement=loop", "pipeline.chunks=2"), loop(2, 2)),
        (("pipeline.placement=v",), vee(2)),
        (("pipeline.placement=wave",), wave(2, 2)),
    ],
)
def test_auto_begins_with_split_backwards_on_the_placement(
    settings: tuple[str, ...], placement: Placement
) -> None:
    given = ("parallel.pp=2", "pipeline.schedule=auto", "model.layers=8", *settings)
    _, layout = resolve(configure(*given), None, None, measure=BY_UNITS)
    assert layout.schedule.placement == placement
    kinds = {op.kind for rank in range(2) for op in layout.schedule.rank_ops(rank)}
    assert kinds == {Kind.F, Kind.I, Kind.W}


@pytest.mark.parametrize(
    ("settings", "limit"),
    [((), 1), (("pipeline.placement=v",), 2)],
)
def test_auto_begins_within_the_memory_limit(settings: tuple[str, ...], limit: int) -> None:
    given = ("parallel.pp=4", "pipeline.schedule=auto", "model.layers=8", "train.global_batch=8")
    config = configure(*given, f"pipeline.activation_limit={limit}", *settings)
    _, layout = resolve(config, None, None, measure=BY_UNITS)
    assert layout.schedule.whole_microbatches == layout.microbatches
    assert max(peak_held(layout.schedule)) <= limit


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        ([], []),
        (["train.steps=20"], ["warm-up of 2 steps: the usual 100 leave too few for the decay"]),
        (["train.steps=9"], ["warm-up of 0 steps: "]),
        (["train.steps=20", "optimizer.warmup_steps=0.5"], []),
        (["log.timeline=[300,2]"], []),
        (["log.profile=[301]"], ["no profile of step 301 (log.profile): the run ends after"]),
        (["log.timeline=[301]"], ["no timeline of step 301 (log.timeline): the run ends after"]),
        (
            ["train.stop_after=10", "log.timeline=[10, 11, 300]"],
            ["no timeline of steps 11, 300 (log.timeline): the run ends after step 10"],
        ),
    ],
)
def test_what_does_not_fit_into_a_short_run_is_left_out_with_a_note(
    overrides: list[str], notes: list[str]
) -> None:
    config, _ = resolve(configure(*overrides), None, None)
    found = shortened(config)
    assert len(found) == len(notes)
    assert all(note.startswith(words) for note, words in zip(found, notes, strict=True))
