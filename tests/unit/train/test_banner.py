"""The first lines of a run, and their grammar."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapipe.cli import parse
from megapipe.layout.resolve import resolve
from megapipe.optim.lr import learning_rate
from megapipe.plan.report import report
from megapipe.text import count_noun, join_or, plural
from megapipe.train.banner import _of_decay, banner, banner_lines
from megapipe.train.resume.changes import Change, Changes
from megapipe.train.start_point import StartPoint


def line(*overrides: str, world: int = 1, device: str = "cpu") -> str:
    return banner(begun(*overrides, world=world, device=device))


def begun(*overrides: str, world: int = 1, device: str = "cpu") -> Any:
    """Make as much of a run as the lines are about."""
    model = ["model.layers=2", "model.hidden=16", "model.heads=2", "model.vocab_size=257"]
    config, layout = resolve(parse([*model, *overrides]).config, world, None)
    policy = SimpleNamespace(stage=layout.replicas.zero)
    return SimpleNamespace(
        config=config,
        layout=layout,
        mesh=SimpleNamespace(world=world, device=torch.device(device), backend="gloo"),
        train_step=SimpleNamespace(schedule=layout.schedule, policy=policy),
    )


def test_one_of_each() -> None:
    given = ["train.steps=1", "train.global_batch=1", "train.microbatch=1"]
    parts = line(*given, "train.sequence_length=8", "optimizer.warmup_steps=0").split(" | ")
    assert parts[1:] == [
        "pp 1 x dp 1 x cp 1 x tp 1, 1 process on cpu with gloo",
        "adamw, ZeRO-1",
        "1f1b of 1 micro-batch",
        "1 step of 8 tokens",
        "bitwise reproducible",
    ]
    assert parts[0].endswith(" parameters, fp32")


def test_several_of_each() -> None:
    given = ["parallel.dp=2", "parallel.pp=2", "train.global_batch=16", "train.microbatch=2"]
    parts = line(*given, "train.steps=1000", world=4, device="cuda").split(" | ")
    assert parts[1:4] == [
        "pp 2 x dp 2 x cp 1 x tp 1, 4 processes on cuda with gloo",
        "adamw, ZeRO-1",
        "1f1b of 4 micro-batches",
    ]
    assert parts[4].startswith("1,000 steps of ")
    assert parts[5] == "not bitwise reproducible (run.deterministic)"


def test_parameters_in_all_and_of_a_token() -> None:
    """Counted by hand, also in the plan. There are two matrices of the vocabulary (257 x 16), five
    norms (16 each), and attention in both layers (48 x 16 and 16 x 16). The first layer has an MLP
    (three of 32 x 16). The second has a router (4 x 16), 4 experts (three of 8 x 16 each), one of
    which a token meets, and a shared expert (three of 12 x 16)."""
    given = [
        *("model.norm=rmsnorm", "model.positions=rotary", "model.activation=swiglu"),
        *("model.bias=false", "model.tied_embeddings=false", "model.ffn_hidden=32"),
        *(
            "model.moe.num_experts=4",
            "model.moe.expert_ffn_hidden=8",
            "model.moe.shared_ffn_hidden=12",
        ),
        *("model.moe.top_k=1", "model.moe.norm_topk_prob=false", "model.moe.first_dense_layers=1"),
    ]
    attention, dense, expert = 48 * 16 + 16 * 16, 3 * 32 * 16, 3 * 8 * 16
    rest = 2 * 257 * 16 + 5 * 16 + 2 * attention + dense + 4 * 16 + 3 * 12 * 16
    assert (rest + 4 * expert, rest + expert) == (14_064, 12_912)
    words = "14,064 parameters, of which a token uses 12,912, fp32 | "
    assert line(*given).startswith(words)
    small = ["model.layers=2", "model.hidden=16", "model.heads=2", "model.vocab_size=257"]
    config, layout = resolve(parse([*small, *given]).config, 1, None)
    assert "parameters    14,064, of which a token uses 12,912\n" in report(config, layout)


def test_steps_to_watch_that_a_resumed_run_has_passed() -> None:
    """It goes on after step 5 of 9; a run that begins has passed none."""
    watched = ["log.timeline=[2, 5, 6]", "log.profile=[5, 12]"]
    run = begun("train.steps=9", "optimizer.warmup_steps=0", *watched)
    run.first_step, run.mesh.rank = 5, 0
    run.train_step.streaming, run.train_step.position = None, SimpleNamespace(samples=40)
    run.train_step.skipped_samples = SimpleNamespace(number_after=int)
    run.train_step.kernels = SimpleNamespace(banner=str, warnings=list)
    manifest = SimpleNamespace(coordinates={"samples": 40})
    saved = SimpleNamespace(path="s3://runs/a/step-00000005", step=5, manifest=manifest)
    source: Any = StartPoint()
    notes = {
        name: [line for line in banner_lines(run, source, Changes()) if "(log." in line]
        for name, source.checkpoint in (("begun", None), ("resumed", saved))
    }
    short = "no profile of step 12 (log.profile): the run ends after step 9"
    assert notes["begun"] == [short]
    assert notes["resumed"] == [
        short,
        "no timeline of steps 2, 5 (log.timeline): the run resumes after step 5",
        "no profile of step 5 (log.profile): the run resumes after step 5",
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((), ""),
        (("experts.wire_dtype=int8",), ", rows in int8"),
        (
            (
                "experts.wire_dtype=bf16",
                "experts.link_bandwidths=[8,2.5,1]",
                "experts.ranks_per_node=2",
            ),
            ", rows in bf16, balanced by bandwidths 8, 2.5, 1",
        ),
    ],
)
def test_what_experts_change_in_results(given: tuple[str, ...], told: str) -> None:
    """The first line and the plan say it."""
    ranks = ("parallel.dp=4", "parallel.ep=4", "train.global_batch=4", "train.microbatch=1")
    keys = ("model.moe.num_experts=4", "model.moe.aux_loss_coeff=0.1", *ranks, *given)
    mesh = f"pp 1 x dp 4 x cp 1 x tp 1 (experts over ep 4 x etp 1{told}), 4 processes on"
    assert line(*keys, world=4).split(" | ")[1].startswith(mesh)
    small = ["model.layers=2", "model.hidden=16", "model.heads=2", "model.vocab_size=257"]
    config, layout = resolve(parse([*small, *keys]).config, 4, None)
    plan = report(config, layout)
    assert f"experts over ep 4 of a pipeline rank by all_to_all{told}\n" in plan


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "step", "1 step"),
        (0, "step", "0 steps"),
        (1000, "step", "1,000 steps"),
        (8, "process", "8 processes"),
        (2, "micro-batch", "2 micro-batches"),
        (1, "process", "1 process"),
    ],
)
def test_numbers_in_sentences(number: int, noun: str, text: str) -> None:
    assert count_noun(number, noun) == text
    assert plural(noun, number) == text.split()[1]


def test_alternatives() -> None:
    assert [join_or(values) for values in ([1], [1, 2], [1, 2, 4])] == ["1", "1 or 2", "1, 2 or 4"]


WSD = {"optimizer.schedule": "wsd"}
SHORT = {**WSD, "optimizer.decay_steps": 4}
LATE = "returns to 0.01, its peak, in the next step"

CONSTANT: dict[str, Any] = {
    "optimizer.schedule": "constant",
    "optimizer.min_lr": 3e-05,
    "optimizer.decay_steps": None,
}


@pytest.mark.parametrize(
    ("step", "before", "now", "told"),
    [
        (95, {"train.steps": 100, **WSD}, {"train.steps": 200}, f"0.00505 by step 95, and {LATE}"),
        (100, {"train.steps": 100, **WSD}, {"train.steps": 200}, f"0.0001 by step 100, and {LATE}"),
        (90, {"train.steps": 100, **WSD}, {"train.steps": 200}, None),  # has not begun
        (95, {"train.steps": 100, **WSD}, {"train.steps": 101}, None),  # goes on
        # less than a decay is left, which begins before the step that comes next
        (
            12,
            {"train.steps": 12, **SHORT},
            {"train.steps": 15},
            "0.0001 by step 12, and returns to 0.00505, of a peak of 0.01, in the next step",
        ),
        # the decay that had begun is the stored one
        (
            10,
            {"train.steps": 12, **SHORT},
            {"train.steps": 24, "optimizer.decay_steps": 2},
            f"0.00505 by step 10, and {LATE}",
        ),
        (8, {"train.steps": 12, **SHORT}, {"optimizer.decay_steps": 2}, None),
        (10, {"train.steps": 12, **SHORT}, {"optimizer.decay_steps": 1}, f"0.00505 by.* {LATE}"),
        (10, {"train.steps": 12, **SHORT}, CONSTANT, LATE),
        (51, {"train.steps": 101, "optimizer.schedule": "linear"}, {"train.steps": 202}, "returns"),
        (51, {"train.steps": 101, "optimizer.schedule": "linear"}, {"train.steps": 90}, None),
        (51, {"train.steps": 101, "optimizer.schedule": "linear"}, {"optimizer.lr": 0.02}, None),
        (5, {"train.steps": 100, "optimizer.warmup_steps": 9, **WSD}, {"train.steps": 200}, None),
        (0, {"train.steps": 100, **WSD}, {"train.steps": 200}, None),
    ],
)
def test_a_decay_that_is_taken_back_is_told(
    step: int, before: dict[str, Any], now: dict[str, Any], told: str | None
) -> None:
    """A run goes on after `step` with other keys than those from `before`."""
    usual = {"optimizer.lr": 0.01, "optimizer.min_lr": 0.0001, "optimizer.warmup_steps": 0}
    before = usual | before
    given = {key: "null" if value is None else value for key, value in (before | now).items()}
    run = begun(*(f"{key}={value}" for key, value in given.items()))
    run.first_step = step
    changes = [Change(key, before[key], value) for key, value in now.items()]
    lines = list(_of_decay(run, changes))
    assert len(lines) == (told is not None)
    if told is not None:
        assert re.search(f"^optimizer.schedule=.*: the learning rate had .*{told}", lines[0])
        assert learning_rate(run.config.optimizer, step, run.config.train.steps) > 0.0001
