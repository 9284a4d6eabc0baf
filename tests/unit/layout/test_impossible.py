"""Every impossible combination of keys, and numbers of processes that do not fit."""

import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve

BASE = ("model.layers=8", "model.heads=8", "model.hidden=64", "train.global_batch=48")


def configure(*overrides: str) -> Config:
    return parse([*BASE, *overrides]).config


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
            ["checkpoint.url=elsewhere"],
            "checkpoint.url=elsewhere: expected a URL such as s3://bucket/path, or null; a",
        ),
        (
            ["checkpoint.url=file:///checkpoints"],
            "checkpoint.url=file:///checkpoints: expected a path, not a URL, for a local folder",
        ),
        (
            ["checkpoint.url=memory://x", "parallel.dp=2"],
            "checkpoint.url=memory://x is the memory of one of 2: expected a store",
        ),
        (
            ["checkpoint.url=s3://"],
            "checkpoint.url=s3://: expected a protocol and a path, as in s3://bucket/path",
        ),
        (
            ["checkpoint.load=s3://bucket/run-*"],
            "checkpoint.load=s3://bucket/run-*: expected a protocol and a path",
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
            ["model.positions=rotary", "model.rope.percent=0.3"],
            "model.head_dim=8 (hidden / heads by default) x model.rope.percent=0.3 is 2.4",
        ),
        (
            ["model.positions=rotary", "model.rope.scaling=yarn"],
            "model.rope.scaling=yarn needs model.rope.original_positions",
        ),
        (
            (
                "model.positions=rotary",
                "model.rope.scaling=llama3",
                "model.rope.original_positions=64",
                "model.rope.low_freq_factor=4",
            ),
            "model.rope.low_freq_factor=4 is not below model.rope.high_freq_factor=4",
        ),
        (
            ["model.rope.base=500"],
            "model.rope.base=500.0 has no effect without model.positions=rotary: expected 10000",
        ),
        (
            ["model.rope.base=500", "model.rope.percent=0.5"],
            "model.rope.base=500.0, model.rope.percent=0.5 have no effect without model.pos",
        ),
        (
            ["model.rope.percent=0.5"],
            "model.rope.percent=0.5 has no effect without model.positions=rotary: expected 1.0, or",
        ),
        (
            ["model.zero_centered_norm=true"],
            (
                "model.zero_centered_norm=true has no effect without model.norm=rmsnorm: expected "
                "false, or"
            ),
        ),
        (
            ["model.full_attention_every=2"],
            (
                "model.full_attention_every=2 has no effect without model.sliding_window: expected "
                "null, or"
            ),
        ),
        (
            ["model.sliding_window=4", "model.dropout=0.1"],
            "model.sliding_window needs model.dropout=0, not 0.1",
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
            (
                "optimizer.warmup_steps=0.25 (75 steps) leaves too few of train.steps=300 for a "
                "decay of 250 or more: expected at most 0.166666 (50 steps)"
            ),
        ),
        (
            ["train.steps=10", "optimizer.warmup_steps=0.96"],
            (
                "warmup_steps=0.96 (10 steps) leaves too few of train.steps=10 for a decay of 1 or "
                "more: expected at most 0.9 (9 steps)"
            ),
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
            ["parallel.pp=4", "pipeline.stage_layout=[4, 4]"],
            (
                "pipeline.stage_layout='E L*4 | L*4 H' has 2 stages: expected 4, as "
                "pipeline.schedule=1f1b has on parallel.pp=4 ranks"
            ),
        ),
        (["pipeline.stage_layout=[7]"], "places 7 layers, but model.layers is 8"),
        (["pipeline.stage_layout=[]"], "expected one layer count per stage"),
        (["pipeline.stage_layout=E L*8"], "has 0 times H"),
        (["pipeline.schedule=1f1bb"], "pipeline.schedule=1f1bb: "),
        (["parallel.pp=2", "pipeline.chunks=2"], "pipeline.schedule=1f1b: "),
        (
            [
                "parallel.pp=2",
                "pipeline.options.microbatch_group_size=13",
                "pipeline.schedule=interleaved_1f1b",
            ],
            "pipeline.schedule=interleaved_1f1b: ",
        ),
        (
            ["pipeline.sequence_slices=2"],
            "pipeline.schedule=1f1b: schedule 1f1b: slices must be 1, not 2",
        ),
        (
            [
                "pipeline.schedule=1f1b_rr",
                "parallel.pp=4",
                "pipeline.options.ranks_per_stage=[2,1]",
            ],
            "ranks_per_stage [2, 1] adds up to 3 ranks; it must add up to 4",
        ),
        (
            [
                *("pipeline.schedule=1f1b_rr", "parallel.pp=3"),
                *("train.global_batch=9", "train.microbatch=1"),
            ],
            (
                "microbatches must be a multiple of 2 for ranks_per_stage [2, 1], not 9; the next "
                "is 10"
            ),
        ),
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
            ["pipeline.schedule=seq1f1b", "parallel.pp=2", "pipeline.sequence_slices=257"],
            "257 slices of a sequence of 256 tokens in multiples of 1: expected 1 to 256",
        ),
        (
            [
                "pipeline.schedule=seq1f1b",
                "pipeline.sequence_slices=65",
                "parallel.tp=4",
                "parallel.sequence_parallel=true",
            ],
            (
                "65 slices of a sequence of 256 tokens in multiples of 4: expected 1 to 64, "
                "or 65 of 260 tokens"
            ),
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
        (
            ["pipeline.placement=v"],
            "pipeline.placement=v has no effect without pipeline.schedule=a",
        ),
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
    ("given", "shown"),
    [
        ("microbatch_group_size=2", "microbatch_group_size=2"),
        ("chimera_pairs=2", "chimera_pairs=2"),
        ("ranks_per_stage=[2,1]", "ranks_per_stage=[2, 1]"),
    ],
)
def test_options_of_other_schedules_are_refused(given: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(f"pipeline.options.{given}")
    assert str(caught.value) == (
        f"command line: pipeline.options.{shown}: pipeline.schedule=1f1b has no such option: "
        "it has extra_warmup"
    )


def test_the_share_for_a_warm_up_that_is_named_is_one() -> None:
    """Rounded down, and still of as many whole steps."""
    keys = ["optimizer.decay_steps=250", "optimizer.warmup_steps=0.166666"]
    config, _ = resolve(parse(keys).config, 1, None)
    assert config.optimizer.warmup(config.train.steps) == 50


@pytest.mark.parametrize(
    ("overrides", "world", "words"),
    [
        (
            ["parallel.tp=4", "parallel.pp=2"],
            12,
            (
                "world size 12 does not divide into pp 2 x cp 1 x tp 4: expected a multiple of 8; "
                "start with python -m megapipe.launch --nproc 8 -m megapipe train ..."
            ),
        ),
        (
            ["parallel.tp=2", "parallel.dp=2"],
            8,
            (
                "world size 8 for dp 2 x pp 1 x cp 1 x tp 2: expected 4; start with "
                "python -m megapipe.launch --nproc 4 -m megapipe train ..."
            ),
        ),
        (
            ["parallel.tp=8", "parallel.pp=4", "parallel.dp=1", "model.heads=8"],
            1,
            (
                "world size 1 for dp 1 x pp 4 x cp 1 x tp 8: expected 32; start with "
                "python -m megapipe.launch --nnodes 4 --nproc 8 "
                "--rdzv-endpoint HOST:PORT --rdzv-id ID -m megapipe train ..."
            ),
        ),
        (
            ["parallel.pp=4", "parallel.tp=2", "pipeline.transport=in_process"],
            3,
            (
                "world size 3 does not divide into cp 1 x tp 2 "
                "(the pipeline runs in each process): expected a multiple of 2; start with "
                "python -m megapipe.launch --nproc 2 -m megapipe train ..."
            ),
        ),
    ],
)
def test_wrong_world(overrides: list[str], world: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(configure(*overrides), world, None, where="x.yaml")
    assert str(caught.value) == f"x.yaml: {words}"
    with pytest.raises(ConfigError) as caught:
        resolve(configure(*overrides, f"plan.gpus={world}"), None, None, where="x.yaml")
    planned = words.partition("; start with")[0].replace("world size ", "plan.gpus=")
    assert str(caught.value) == f"x.yaml: {planned}"
