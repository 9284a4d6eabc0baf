"""What several keys decide together: defaults filled in, and every impossible combination."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.cli import dump, parse
from megapipe.config import Config
from megapipe.errors import ConfigError, LaunchError, MegapipeError
from megapipe.layout.checks import shortened
from megapipe.layout.resolve import resolve
from megapipe.layout.slices import balanced_slices
from megapipe.model.partition import format_layout
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


def test_in_process_pipeline_ranks_are_no_processes() -> None:
    overrides = ("parallel.pp=4", "parallel.tp=2", "pipeline.channels=in_process")
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
        (("parallel.pp=2", "pipeline.layout=[3, 5]"), "E L*3 | L*5 H"),
        (("parallel.pp=2", "pipeline.layout=ELL|LLLLLLH"), "E L*2 | L*6 H"),
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
    _, layout = resolve(configure(*overrides, "pipeline.slices=3"), None, None)
    assert layout.slice_lengths == balanced_slices(layout.model.causal_flops, 256, 3)
    assert sum(layout.slice_lengths) == 256
    assert (layout.microbatches, layout.schedule.slices) == (2, 3)
    overrides += ["pipeline.slices=3", "parallel.tp=4", "parallel.sequence_parallel=true"]
    _, layout = resolve(configure(*overrides), None, None)
    assert layout.slice_lengths == balanced_slices(layout.model.causal_flops, 256, 3, 4)
    assert not any(length % 4 for length in layout.slice_lengths)
    assert resolve(configure("parallel.pp=2"), None, None)[1].slice_lengths == (256,)


def test_micro_batches_are_counted_whole() -> None:
    halving = "pipeline.schedule=chimera_backward_halving"
    _, layout = resolve(configure("parallel.pp=2", halving), None, None)
    assert (layout.microbatches, layout.schedule.microbatches) == (12, 24)


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
    _, layout = resolve(configure("parallel.pp=2", own), None, None)
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
    return replace(schedule, ops=(first, *rest), held_limit=None)

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
        ("invalid:unpacked", "its lists of operations must be arrays of packed ones"),
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
    given = configure("parallel.pp=2", f"pipeline.schedule={spec}", "pipeline.memory_limit=12")
    with pytest.raises(ConfigError) as raised:
        resolve(given, None, None)
    assert str(raised.value).startswith(f"configuration: pipeline.schedule={spec}: ")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["model.heads=6"],
            (
                "model.hidden=64 is not divisible by model.heads=6: set model.head_dim, or heads "
                "could be 1, 2, 4, 8, 16, 32 or 64"
            ),
        ),
        (
            ["model.kv_heads=3"],
            "model.heads=8 is not divisible by model.kv_heads=3: kv_heads could be 1, 2, 4 or 8",
        ),
        (
            ["parallel.tp=3"],
            "model.heads=8 is not divisible by parallel.tp=3: tp could be 1, 2, 4 or 8",
        ),
        (
            ["parallel.tp=4", "model.kv_heads=2"],
            "model.kv_heads=2 is not divisible by parallel.tp=4: tp could be 1 or 2",
        ),
        (
            ["parallel.tp=4", "model.ffn_hidden=90"],
            "model.ffn_hidden=90 is not divisible by parallel.tp=4: tp could be 1, 2, 3, 5, 6, 9,",
        ),
        (
            ["model.positions=rotary", "model.head_dim=7"],
            "model.head_dim=7 (hidden / heads by default) is odd",
        ),
        (
            ["model.positions=rotary", "model.rotary_share=0.3"],
            "model.head_dim=8 (hidden / heads by default) x model.rotary_share=0.3 is 2.4",
        ),
        (
            ["model.positions=rotary", "model.rotary_scaling=yarn"],
            "model.rotary_scaling=yarn needs model.rotary_original_positions",
        ),
        (
            (
                "model.positions=rotary",
                "model.rotary_scaling=llama3",
                "model.rotary_original_positions=64",
                "model.rotary_turns_low=4",
            ),
            "model.rotary_turns_low=4 is not below model.rotary_turns_high=4",
        ),
        (
            ["model.rotary_share=0.5"],
            "model.rotary_share=0.5 has no effect without model.positions=rotary: expected 1.0, or",
        ),
        (
            ["model.norm_offset=true"],
            "model.norm_offset=true has no effect without model.norm=rmsnorm: expected false, or",
        ),
        (
            ["model.full_attention_every=2"],
            "model.full_attention_every=2 has no effect without model.window: expected null, or",
        ),
        (
            ["model.window=4", "model.dropout=0.1"],
            "model.window needs model.dropout=0, not 0.1",
        ),
        (
            ["model.positions=alibi", "model.dropout=0.1"],
            "model.positions=alibi needs model.dropout=0, not 0.1",
        ),
        (
            ["model.vocab_size=100"],
            (
                "model.vocab_size=100 is smaller than the vocabulary of data.tokenizer=byte: "
                "expected at least 257"
            ),
        ),
        (
            ["model.max_positions=100"],
            (
                "train.sequence_length=256 is longer than the position table, "
                "model.max_positions=100: expected at most that"
            ),
        ),
        (
            ["parallel.tp=4", "parallel.sequence_parallel=true", "train.sequence_length=30"],
            (
                "train.sequence_length=30 is not divisible by parallel.tp=4, which "
                "parallel.sequence_parallel needs: expected a multiple, such as 28 or 32"
            ),
        ),
        (
            ["train.global_batch=10", "parallel.dp=2"],
            (
                "train.global_batch=10 is not divisible by train.microbatch=4 x dp 2 = 8: "
                "expected a multiple, such as 8 or 16"
            ),
        ),
        (
            ["train.global_batch=2"],
            (
                "train.global_batch=2 is not divisible by train.microbatch=4 x dp 1 = 4: "
                "expected a multiple, such as 4"
            ),
        ),
        (
            ["optimizer.lr=1e-5"],
            "optimizer.min_lr=3e-05 is above the peak, optimizer.lr=1e-05",
        ),
        (
            ["train.steps=100", "optimizer.warmup_steps=100"],
            (
                "optimizer.warmup_steps=100 leaves too few of train.steps=100 for a decay of 1 or "
                "more: expected at most 99"
            ),
        ),
        (
            ["optimizer.decay_steps=250", "optimizer.warmup_steps=0.25"],
            "optimizer.warmup_steps=0.25 (75 steps) leaves too few of train.steps=300 for a decay",
        ),
        (
            ["optimizer.schedule=wsd", "train.steps=105", "optimizer.warmup_steps=100"],
            "for a decay of 10 or more: expected at most 95",
        ),
        (["optimizer.decay_steps=301"], "optimizer.decay_steps=301 is more than train.steps=300"),
        (
            ["optimizer.schedule=constant", "train.steps=99", "optimizer.warmup_steps=100"],
            "optimizer.warmup_steps=100 leaves too few of train.steps=99",
        ),
        (
            ["parallel.backend=nccl", "parallel.device=cpu"],
            "parallel.backend=nccl needs parallel.device=cuda",
        ),
        (
            ["parallel.pp=16"],
            (
                "16 pipeline stages (parallel.pp x pipeline.chunks) for 8 layers, embedding and "
                "head: at most 10 stages"
            ),
        ),
        (
            ["parallel.pp=4", "pipeline.layout=[4, 4]"],
            (
                "pipeline.layout='E L*4 | L*4 H' has 2 stages: expected 4, as "
                "pipeline.schedule=1f1b has on parallel.pp=4 ranks"
            ),
        ),
        (["pipeline.layout=[7]"], "places 7 layers, but model.layers is 8"),
        (["pipeline.layout=[]"], "expected one layer count per stage"),
        (["pipeline.layout=E L*8"], "has 0 times H"),
        (["pipeline.schedule=1f1bb"], "pipeline.schedule=1f1bb: "),
        (["parallel.pp=2", "pipeline.chunks=2"], "pipeline.schedule=1f1b: "),
        (
            ["parallel.pp=2", "pipeline.group=13", "pipeline.schedule=interleaved_1f1b"],
            "pipeline.schedule=interleaved_1f1b: ",
        ),
        (["pipeline.group=2"], "pipeline.schedule=1f1b: "),
        (["pipeline.pairs=2"], "pipeline.schedule=1f1b: schedule 1f1b: pairs must not be given"),
        (["pipeline.slices=2"], "pipeline.schedule=1f1b: schedule 1f1b: slices must be 1, not 2"),
        (
            ["pipeline.schedule=chimera", "parallel.pp=3"],
            (
                "pipeline.schedule=chimera: schedule chimera: ranks must be a multiple of 2, not "
                "3; the next is 4"
            ),
        ),
        (
            ["pipeline.schedule=chimera_backward_halving", "parallel.pp=2", "train.microbatch=3"],
            (
                "train.microbatch=3 cannot be cut as pipeline.schedule=chimera_backward_halving "
                "cuts it: expected a multiple of 2"
            ),
        ),
        (
            ["pipeline.schedule=seq1f1b", "parallel.pp=2", "pipeline.slices=257"],
            "257 slices of a sequence of 256 tokens in multiples of 1; there can be 1 to 256",
        ),
        (
            [
                "pipeline.schedule=seq1f1b",
                "pipeline.slices=65",
                "parallel.tp=4",
                "parallel.sequence_parallel=true",
            ],
            "65 slices of a sequence of 256 tokens in multiples of 4; there can be 1 to 64",
        ),
        (
            ["log.timeline=[3,0]"],
            "log.timeline=[3, 0]: there is no step 0: expected steps counted from 1",
        ),
        (["log.profile=[-1]"], "log.profile=[-1]: there is no step -1: expected steps counted"),
        (
            ["checkpoint.export_every=5", "model.positions=alibi", "model.norm=rmsnorm"],
            "checkpoint.export_every=5: model.norm = rmsnorm cannot be expressed",
        ),
        (
            ["train.steps=200", "train.stop_after=201"],
            "is more than train.steps=200: expected at m",
        ),
        (["pipeline.placement=v"], "pipeline.placement=v is for pipeline.schedule=auto"),
        (["pipeline.schedule=gone.csv"], "pipeline.schedule=gone.csv: schedule gone.csv: No such"),
        (["pipeline.schedule=gone:f"], "schedule gone:f: there is no module 'gone'"),
        (
            ["train.global_batch=4000000000"],
            "train.global_batch=4000000000 makes 1000000000 micro-batches through 1 stages",
        ),
    ],
)
def test_impossible(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(configure(*overrides), None, None, where="x.yaml")
    text = str(caught.value)
    assert text.startswith("x.yaml: ")
    assert words in text
    assert text.isprintable(), "one line"


@pytest.mark.parametrize(
    ("overrides", "world", "words"),
    [
        (
            ["parallel.tp=4", "parallel.pp=2"],
            12,
            (
                "world size 12 does not divide into pp 2 x cp 1 x tp 4: expected a multiple of 8; "
                "start with python -m megapipe.launch --nproc 8 train.py ..."
            ),
        ),
        (
            ["parallel.tp=2", "parallel.dp=2"],
            8,
            (
                "world size 8 for dp 2 x pp 1 x cp 1 x tp 2: expected 4; start with "
                "python -m megapipe.launch --nproc 4 train.py ..."
            ),
        ),
        (
            ["parallel.tp=8", "parallel.pp=4", "parallel.dp=1", "model.heads=8"],
            1,
            (
                "world size 1 for dp 1 x pp 4 x cp 1 x tp 8: expected 32; start with "
                "python -m megapipe.launch --nnodes 4 --nproc 8 "
                "--rdzv-endpoint HOST:PORT --rdzv-id ID train.py ..."
            ),
        ),
        (
            ["parallel.pp=4", "parallel.tp=2", "pipeline.channels=in_process"],
            3,
            (
                "world size 3 does not divide into cp 1 x tp 2 "
                "(the pipeline runs in each process): expected a multiple of 2; start with "
                "python -m megapipe.launch --nproc 2 train.py ..."
            ),
        ),
    ],
)
def test_wrong_world(overrides: list[str], world: int, words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        resolve(configure(*overrides), world, None, where="x.yaml")
    assert str(caught.value) == f"x.yaml: {words}"


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
    _, layout = resolve(configure(*given), None, None)
    assert layout.schedule.placement == placement
    kinds = {op.kind for rank in range(2) for op in layout.schedule.rank_ops(rank)}
    assert kinds == {Kind.F, Kind.I, Kind.W}


@pytest.mark.parametrize(
    ("settings", "limit"),
    [((), 1), (("pipeline.placement=v",), 2)],
)
def test_auto_begins_within_the_memory_limit(settings: tuple[str, ...], limit: int) -> None:
    given = ("parallel.pp=4", "pipeline.schedule=auto", "model.layers=8", "train.global_batch=8")
    config = configure(*given, f"pipeline.memory_limit={limit}", *settings)
    _, layout = resolve(config, None, None)
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
