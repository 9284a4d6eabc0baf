"""Keys of pipelines without a flush: what they resolve to, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megapipe.cli import parse
from megapipe.errors import ConfigError
from megapipe.layout.buckets import process_buckets
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.plan.communicators import communicators
from megapipe.plan.memory import model_memory
from megapipe.plan.memory_fit import size_text
from megapipe.plan.report import report
from megapipe.plan.traffic import step_traffic
from megapipe.plan.units import Units
from megapipe.schedule.async_schedules.async_schedule import mean_staleness, versions_kept

BASE = (
    *("model.layers=8", "model.heads=4", "model.hidden=64", "model.tied_embeddings=false"),
    *("train.global_batch=16", "train.microbatch=2", "parallel.pp=4", "parallel.dp=1"),
)
STASH = ("pipeline.weight_versions=stash", "optimizer.clip_scope=stage")
LATEST = ("pipeline.weight_versions=latest", "optimizer.clip_scope=stage")
BUFFERED = ("pipeline.weight_versions=double_buffer",)
S, L, B = " ".join(STASH), " ".join(LATEST), " ".join(BUFFERED)
P = "pipeline.weight_versions=predict optimizer.max_grad_norm=null"
C = "pipeline.weight_versions=correct optimizer.max_grad_norm=null"
GROUPS = "pipeline.weight_versions=double_group optimizer.max_grad_norm=null"


def layout_of(*given: str) -> Layout:
    return resolve(parse([*BASE, *given]).config, None, 257)[1]


@pytest.mark.parametrize(
    ("given", "stages", "versions"),
    [
        (STASH, 4, [2, 2, 2, 1]),
        ((*STASH, "train.microbatch=16"), 4, [4, 3, 2, 1]),
        ((*LATEST, "train.microbatch=16"), 4, [1, 1, 1, 1]),
        (BUFFERED, 4, [2, 2, 2, 2]),
        (
            (*STASH, "pipeline.schedule=1f1b_rr", "pipeline.options.ranks_per_stage=[2,1,1]"),
            3,
            [2, 2, 1],
        ),
        (
            (*BUFFERED, "pipeline.schedule=1f1b_rr", "pipeline.options.ranks_per_stage=[1,1,2]"),
            3,
            [2, 2, 2],
        ),
        ((*STASH, "pipeline.schedule=eager_1f1b", "train.microbatch=8"), 4, [4, 3, 2, 1]),
        (
            (
                *("pipeline.weight_versions=double_group", "optimizer.max_grad_norm=null"),
                "pipeline.schedule=two_group",
            ),
            8,
            [2, 2, 2, 2, 1, 1, 1, 1],
        ),
    ],
)
def test_versions_of_each_stage(given: tuple[str, ...], stages: int, versions: list[int]) -> None:
    layout = layout_of(*given)
    assert layout.async_schedule is not None
    assert layout.stages == stages
    kept = versions_kept(layout.async_schedule)
    assert [kept[stage] for stage in range(stages)] == versions


def test_mean_staleness_is_the_share_of_a_window_that_is_ahead() -> None:
    for given, behind in ((STASH, [3, 2, 1, 0]), (LATEST, [3, 2, 1, 0]), (BUFFERED, [8] * 4)):
        layout = layout_of(*given)
        assert layout.async_schedule is not None
        found = mean_staleness(layout.async_schedule)
        assert [found[stage] for stage in range(4)] == [Fraction(each, 8) for each in behind]


def test_training_is_synchronous_by_default() -> None:
    layout = layout_of()
    assert layout.async_schedule is None
    assert layout.run_schedule is layout.schedule


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("pipeline.weight_versions=fresh",
         "pipeline.weight_versions=fresh: expected one of synchronous, stash"),
        ("pipeline.weight_versions=stash",
         "needs optimizer.clip_scope=stage (or optimizer.max_grad_norm=null)"),
        ("optimizer.clip_scope=stage", "clip_scope=stage has no effect without a pipeline.weig"),
        (f"{S} schedule=zb_h1", "pipeline.schedule=1f1b, eager_1f1b or 1f1b_rr, not zb_h1"),
        (f"{S} schedule=auto", "needs pipeline.schedule=1f1b, eager_1f1b or 1f1b_rr, not auto"),
        (f"{S} schedule=two_group", "pipeline.schedule=1f1b, eager_1f1b or 1f1b_rr, not two_group"),
        (
            GROUPS,
            "double_group needs pipeline.schedule=two_group, not 1f1b",
        ),
        (f"{GROUPS} schedule=two_group pipeline.chunks=2", "needs pipeline.chunks=null, not 2"),
        (
            f"{GROUPS} schedule=two_group advance=1",
            "extra_warmup=1: pipeline.schedule=two_group has no such option: it has none",
        ),
        (
            f"{GROUPS} schedule=two_group batch=4",
            "double_group: two_group on 4 ranks needs steps of at least 3 micro-batches, not 2: ",
        ),
        (f"{GROUPS} schedule=two_group batch=4", "expected a train.global_batch of at least 6"),
        (f"{S} pipeline.chunks=2", "needs pipeline.chunks=null, not 2"),
        (f"{S} pipeline.sequence_slices=2", "needs pipeline.sequence_slices=null, not 2"),
        (
            f"{S} pipeline.options.ranks_per_stage=[2,1,1]",
            "ranks_per_stage=[2, 1, 1]: pipeline.schedule=1f1b has no such option: it has extra",
        ),
        (f"{L} schedule=1f1b_rr", "latest needs pipeline.schedule=1f1b or eager_1f1b, not 1f1b_rr"),
        (
            f"{S} schedule=1f1b_rr advance=1",
            "extra_warmup=1: pipeline.schedule=1f1b_rr has no such option: it has ranks_per_stage",
        ),
        (
            f"{S} schedule=1f1b_rr batch=6",
            "must be a multiple of 2 for ranks_per_stage [2, 1, 1], not 3",
        ),
        (f"{S} schedule=1f1b_rr batch=6", "the next is 4"),
        (
            f"{B} schedule=1f1b_rr batch=4",
            "4 micro-batches are in flight ahead of a step, which has 2: expected a train.global",
        ),
        (f"{B} schedule=1f1b_rr batch=4", "train.global_batch of at least 8"),
        (
            f"{B} schedule=1f1b_rr model.tied_embeddings=true",
            "needs model.tied_embeddings=false with pipeline.schedule=1f1b_rr",
        ),
        (f"{S} pipeline.activation_limit=4", "needs pipeline.activation_limit=null, not 4"),
        (f"{B} batch=4", "ahead of a step, which has 2: expected a train.global_batch of at least"),
        (f"{B} batch=4", "train.global_batch of at least 6"),
        (
            f"{S} model.tied_embeddings=true",
            "needs model.tied_embeddings=false, or pipeline.weight_versions=double_buffer",
        ),
        (f"{L} model.tied_embeddings=true", "needs model.tied_embeddings=false, or"),
        (f"{S} parallel.cp=2", "needs parallel.cp=1, not 2"),
        (f"{S} lora.rank=2", "needs lora.rank=null, not 2"),
        (f"{S} model.dtype=fp16", "needs model.dtype=bf16, fp32 or fp64, not fp16"),
        (f"{S} optimizer.zero=2", "needs optimizer.zero=0 or 1, not 2"),
        (f"{L} optimizer.weight_prediction=1", "needs optimizer.weight_prediction=0, not 1"),
        (f"{S} optimizer.post_validation=true", "needs optimizer.post_validation=false"),
        (f"{S} model.dtype=bf16 optimizer.master_weights=none",
         "needs optimizer.master_weights=fp32"),
        (f"{L} kernels.compile=true", "needs kernels.compile=false"),
        (f"{P} kernels.compile=true", "needs kernels.compile=false"),
        (f"{L} activations.policy=full", "activations.policy=keep and activations.offload=[]"),
        (f"{L} activations.offload=[norm]", "activations.offload=[]"),
        (f"{L} advance=1",
         "latest needs kernels.loss_chunk_tokens=0 with pipeline.options.extra_warmup"),
        (
            f"{S} optimizer.weight_prediction=1 pipeline.lr_anneal_steps=9",
            "stash needs pipeline.lr_anneal_steps=null with optimizer.weight_prediction=1",
        ),
        (f"{L} optimizer.weight_prediction=staleness",
         "needs optimizer.weight_prediction=0, not staleness"),
        ("optimizer.weight_prediction=staleness", "synchronous: expected a whole number"),
        ("optimizer.weight_prediction=stale",
         "weight_prediction=stale: expected a whole number >= 0, or stalen"),
        ("optimizer.weight_prediction=-1",
         "weight_prediction=-1: expected a whole number >= 0, or staleness"),
        (
            f"{S} optimizer.weight_prediction=staleness pipeline.synchronous_steps=2 train.steps=9",
            ("stash needs pipeline.synchronous_steps=null with "
             "optimizer.weight_prediction=staleness"),
        ),
        (
            f"{S} optimizer.weight_prediction=staleness optimizer.rule=muon",
            "optimizer.weight_prediction=staleness needs optimizer.rule=adamw",
        ),
        ("pipeline.lr_anneal_steps=9",
         "has no effect without a pipeline.weight_versions other than"),
        (f"{S} pipeline.prediction_horizon=round_trip",
         "has no effect without pipeline.weight_versions=predict"),
        (f"{L} pipeline.velocity_decay=0.5",
         "has no effect without pipeline.weight_versions=correct"),
        ("pipeline.velocity_decay=0.5", "has no effect without pipeline.weight_versions=correct"),
        (f"{C} pipeline.velocity_decay=1",
         "pipeline.velocity_decay=1: expected a number > 0 and < 1"),
        (f"{C} pipeline.prediction_horizon=round_trip",
         "has no effect without pipeline.weight_versions=predict"),
        (f"{C} optimizer.max_grad_norm=1", "correct needs optimizer.clip_scope=stage"),
        (f"{C} kernels.compile=true", "correct needs kernels.compile=false"),
        (f"{C} activations.policy=selective", "correct needs activations.policy=keep and"),
        (f"{C} activations.offload=[norm]", "correct needs activations.policy=keep and"),
        (f"{C} optimizer.weight_prediction=1",
         "correct needs optimizer.weight_prediction=0, not 1"),
        (f"{C} advance=1",
         "correct needs kernels.loss_chunk_tokens=0 with pipeline.options.extra_warmup"),
        (f"{C} model.tied_embeddings=true", "correct needs model.tied_embeddings=false"),
        (f"{C} schedule=two_group", "schedule=1f1b or eager_1f1b, not two_group"),
        ("pipeline.synchronous_steps=9",
         "has no effect without a pipeline.weight_versions other than"),
        (
            f"{S} pipeline.synchronous_steps=9 train.steps=9",
            "none of train.steps=9 is left for pipeline.weight_versions=stash: expected at most 8",
        ),
        (f"{P} optimizer.rule=muon", "predict needs optimizer.rule=adamw, adam, sgd, lion,"),
        (f"{P} optimizer.offload=host", "predict needs optimizer.offload=none, not host"),
        (f"{P} activations.policy=stage", "activations.policy=keep and activations.offload=[]"),
        (f"{P} optimizer.weight_prediction=1", "needs optimizer.weight_prediction=0, not 1"),
        (f"{S} train.batch_ramp=[4,4,8]", "needs train.batch_ramp=null"),
        (f"{S} health.non_finite=skip", "needs health.non_finite=stop and"),
        (f"{S} health.spike_factor=3", "health.spike_factor=null"),
        (f"{S} health.replay_every=3", "needs health.replay_every=0, not 3"),
    ],
)  # fmt: skip
def test_what_it_does_not_go_with_is_refused_in_one_line(given: str, words: str) -> None:
    for short, key in (
        (" schedule=", " pipeline.schedule="),
        (" advance=", " pipeline.options.extra_warmup="),
        (" batch=", " train.global_batch="),
    ):
        given = given.replace(short, key)
    with pytest.raises(ConfigError) as info:
        layout_of(*given.split())
    assert words in str(info.value)
    assert "\n" not in str(info.value)


def test_one_end_of_the_pipeline_has_the_states_of_a_tied_embedding() -> None:
    """Each of two replicas has half of the matrix: a master, two moments and what arrives."""
    given = (*BASE, *BUFFERED, "parallel.dp=2", "model.dtype=fp32", "train.global_batch=32")
    config, layout = resolve(parse([*given, "model.tied_embeddings=true"]).config, None, 256)
    matrix = 256 * 64
    first, last = ([*process_buckets(config, layout, rank)][-1] for rank in (0, 3))
    assert (first.updates, last.updates) == (True, False)
    assert first.numel == last.numel == matrix
    tied = [model_memory(config, layout, rank).persistent for rank in (0, 3)]
    untied = resolve(parse([*given]).config, None, 256)
    whole = [model_memory(*untied, rank).persistent for rank in (0, 3)]
    assert tied[0] - whole[0] == 4 * matrix // 2
    assert whole[1] - tied[1] == 4 * 3 * matrix // 2
    sent = [step_traffic(Units(config, layout), rank) for rank in (0, 3)]
    found = [(e.what, e.bytes) for each in sent for e in each if e.what.startswith("tied")]
    assert found == [("tied weights", 4 * matrix), ("tied gradients", 4 * matrix // 2)]
    made = [communicators(config, layout, rank) for rank in range(4)]
    assert [each.channels for each in made] == [4, 4, 4, 4]
    assert [each.groups for each in made] == [(2,)] * 4
    line = "the tied embedding is updated on the first stage, which sends it to the last"
    assert line in report(config, layout)
    assert line not in report(*untied)


def test_the_plan_counts_versions_accumulators_and_masters() -> None:
    def memory(*given: str, rank: int = 0) -> tuple[int, int, int]:
        config, layout = resolve(parse([*BASE, *given]).config, None, 257)
        found = model_memory(config, layout, rank)
        return found.parameters, found.gradients, found.optimizer

    parameters, gradients, states = memory()
    one = ("train.microbatch=16",)
    assert memory(*STASH, *one) == (4 * parameters, gradients, states + parameters)
    assert memory(*LATEST, *one) == (parameters, gradients, states + parameters)
    predicted = (
        "pipeline.weight_versions=predict",
        "optimizer.max_grad_norm=null",
        "pipeline.stage_layout=[2,2,2,2]",
    )
    assert memory(*predicted, *one) == (2 * parameters, gradients, states + parameters)
    corrected = (
        "pipeline.weight_versions=correct",
        "optimizer.max_grad_norm=null",
        "pipeline.stage_layout=[2,2,2,2]",
    )
    assert memory(*corrected, *one) == (2 * parameters, gradients, states + 2 * parameters)
    assert memory(*corrected, *one, rank=3) == memory(*predicted, *one, rank=3), "never stale"
    assert memory(*BUFFERED) == (2 * parameters, 2 * gradients, states + parameters)


def test_the_dry_run_names_bytes_of_versions_and_of_gradients_that_wait() -> None:
    def told(*given: str) -> dict[str, str]:
        config, layout = resolve(parse([*BASE, *given]).config, None, 257)
        line = next(each for each in report(config, layout).splitlines() if "memory  " in each)
        parts = (part.split() for part in line.partition("process: ")[2].split(", "))
        return {" ".join(name): f"{size} {unit}" for *name, size, unit in parts}

    plain, late, stash = told(), told(*BUFFERED), told(*STASH, "train.microbatch=16")
    older, waiting = "other weight versions", "deferred gradients"
    assert late["parameters"] == stash["parameters"] == plain["parameters"] == late[older]
    assert late["gradients"] == stash["gradients"] == plain["gradients"] == late[waiting]
    one = model_memory(*resolve(parse([*BASE]).config, None, 257), 0).parameters
    assert (plain["parameters"], stash[older]) == (size_text(one), size_text(3 * one))
    assert waiting not in stash
    assert older not in plain


def test_the_dry_run_tells_staleness_and_versions_and_draws_several_steps() -> None:
    config, layout = resolve(parse([*BASE, *STASH]).config, None, 257)
    text = report(config, layout)
    assert "schedule 1f1b, stash: " in text
    assert "5 update windows are drawn; the schedule never flushes" in text
    assert "in updates, per stage: 0.375 (0 to 1), 0.25 (0 to 1), 0.125 (0 to 1), 0\n" in text
    assert "including predicted and estimated older ones: 2, 2, 2, 1" in text
    assert "of the model: 4, 3, 2, 1" in text


def test_the_dry_run_tells_of_velocities_and_synchronous_steps() -> None:
    given = (*C.split(), "pipeline.synchronous_steps=7")
    config, layout = resolve(parse([*BASE, *given]).config, None, 257)
    text = report(config, layout)
    assert "synchronous steps at the start: 7" in text
    assert "additional state at stages 0, 1, 2: velocity of the weights" in text
    assert "including predicted and estimated older ones: 2, 2, 2, 1" in text


def test_a_step_takes_the_time_of_its_own_operations_in_the_plan() -> None:
    def seconds(*given: str, what: str = "time ") -> float:
        known = ("plan.peak_tflops=1", "plan.device_gb=80", "plan.inter_node_gb_s=1e9")
        fast = (
            "plan.intra_node_gb_s=1e9",
            "pipeline.stage_layout=[2,2,2,2]",
            "model.ffn_hidden=4096",
        )
        config, layout = resolve(parse([*BASE, *known, *fast, *given]).config, None, 257)
        lines = report(config, layout).splitlines()
        (line,) = (each for each in lines if each.startswith(what) and " s " in each)
        return float(line.split()[1])

    assert seconds(*BUFFERED) / seconds() == pytest.approx(8 / 11, rel=0.02)
    # the last stage, which has the head, is slower than the others, which a pause waits for
    assert seconds(*BUFFERED, what="pause ") / seconds(*BUFFERED) == pytest.approx(3 / 8, rel=0.05)
