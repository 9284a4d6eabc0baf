"""Training without a flush, against one process that trains with stale weights on whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from megapipe.layers.weight_grad import main_grad
from megapipe.plan.memory import model_memory
from megapipe.testing import World, WorldError, run_world
from tests.parity import async_faults
from tests.parity.async_ranks import (
    StaleOutcome,
    begun,
    check_stale,
    run_stale,
    run_stale_cases,
    same_parts,
)
from tests.parity.cases import Case, Rows
from tests.parity.outcome import Outcome, Parts
from tests.parity.ranks import run_case
from tests.parity.tiers import in_parts, one_of
from tests.parity.traced_compiler import traced_blocks

POLICIES = ("stash", "vertical", "double_buffer", "latest", "predict", "correct")


def streamed(weights: str, pp: int, m: int, **more: object) -> Case:
    """Return a case of 12 windows, as short as possible."""
    scope = "global" if weights == "double_buffer" else "stage"
    case = Case(
        weights=weights,
        clip_scope=scope,
        pp=pp,
        m=m,
        layers=max(pp, 2),
        uneven=True,  # a layer on each stage
        tied=False,
        steps=12,
        batch=1,
    )
    return replace(case, **more)  # type: ignore[arg-type]


def legal(weights: str, pp: int, m: int) -> bool:
    return weights != "double_buffer" or m >= pp - 1


def in_turns(weights: str, m: int, *replicas: int, **more: object) -> Case:
    """Return a case with stages of several ranks."""
    case = streamed(weights, sum(replicas), m, schedule="1f1b_rr", replicas=replicas)
    return replace(case, **more)  # type: ignore[arg-type]


ALONE = [
    streamed(weights, pp, m, in_process=True)
    for weights in POLICIES
    for pp, m in [(1, 1), (2, 4), (3, 2)]
] + [
    *(
        streamed("double_group", 2, 2, in_process=True, schedule="two_group", layers=4, **more)
        for more in ({}, {"look_ahead": "staleness"})
    ),
    streamed("stash", 3, 2, in_process=True, schedule="eager_1f1b"),
    streamed("vertical", 2, 1, in_process=True, advance=2),
    *(
        streamed("predict", pp, m, in_process=True, horizon="round_trip", rule=rule)
        for pp, m, rule in ((3, 1, "adamw"), (4, 1, "sgd"), (5, 2, "adam"))
    ),
    streamed("predict", 2, 2, in_process=True, advance=1, loss_chunk=0, rule="adabelief"),
    streamed("latest", 2, 2, in_process=True, advance=1, loss_chunk=0),
    streamed("double_buffer", 3, 5, in_process=True, schedule="eager_1f1b", advance=1),
    streamed("double_buffer", 2, 2, in_process=True, clip_scope="stage"),
    streamed("stash", 2, 1, in_process=True, clip=None, rule="sgd"),
    streamed("latest", 4, 1, in_process=True, lr_anneal_steps=8),
    streamed("vertical", 3, 1, in_process=True, lr_anneal_steps=100),
    streamed("predict", 4, 1, in_process=True, lr_anneal_steps=20),
    streamed("correct", 4, 1, in_process=True, lr_anneal_steps=20, correction=0.5),
    streamed("stash", 3, 1, in_process=True, synchronous_steps=3, lr_anneal_steps=5),
    streamed("double_buffer", 3, 2, in_process=True, synchronous_steps=4),
    streamed("correct", 3, 1, in_process=True, synchronous_steps=4, lr_anneal_steps=6),
    streamed("double_buffer", 2, 2, in_process=True, look_ahead=1),
    streamed("stash", 3, 1, in_process=True, look_ahead=2, rule="sgd"),
    streamed("stash", 3, 2, in_process=True, look_ahead="staleness"),
    streamed("vertical", 3, 2, in_process=True, look_ahead="staleness", rule="nadamw"),
    *(
        streamed("double_buffer", pp, m, in_process=True, tied=True)
        for pp, m in ((1, 1), (2, 1), (3, 2), (3, 4))
    ),
    streamed("double_buffer", 2, 2, in_process=True, tied=True, clip_scope="stage", dropout=0.3),
    *(in_turns("stash", m, *c, in_process=True) for m, c in ((2, (2, 1)), (2, (1, 2)))),
    in_turns("stash", 4, 2, 1, 1, in_process=True, lr_anneal_steps=100),
    *(in_turns("double_buffer", m, *c, in_process=True) for m, c in ((2, (2, 1)), (4, (1, 2)))),
]


def check(cases: Sequence[Case]) -> None:
    ranks = run_world(cases[0].world, run_stale_cases, cases, timeout_s=60 + 10 * len(cases))
    for number, case in enumerate(cases):
        try:
            check_stale(case, [outcomes[number] for outcomes in ranks])
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from None


@in_parts(
    ("weights", "every"),
    [(weights, every) for weights in (*POLICIES, "double_group") for every in (2, 1)],
    default=[("correct", 2)],
    full=8,
)
def test_a_process_trains_as_the_definitions_say(weights: str, every: int) -> None:
    check([case for case in ALONE if case.weights == weights][::every])


def test_a_tied_embedding_is_as_far_ahead_as_the_first_stage() -> None:
    check([streamed("double_buffer", 2, 2, in_process=True, look_ahead="staleness", tied=True)])


@pytest.mark.slow
@pytest.mark.parametrize("weights", POLICIES)
def test_a_process_trains_so_in_all_sizes(weights: str) -> None:
    sizes = [(pp, m) for pp in (1, 2, 3, 4) for m in (1, 2, 4, 6) if legal(weights, pp, m)]
    check([streamed(weights, pp, m, in_process=True) for pp, m in sizes])


@pytest.mark.slow
def test_two_groups_train_so_in_all_sizes() -> None:
    sizes = [(pp, m) for pp in (2, 3, 4) for m in (1, 2, 4, 6) if m >= pp - 1]
    given = {"in_process": True, "schedule": "two_group"}
    check([streamed("double_group", pp, m, **given, layers=2 * pp) for pp, m in sizes])


SEVERAL = [
    streamed("double_group", 2, 2, schedule="two_group", layers=4),
    streamed("stash", 2, 2, debug=True, masked=0.3, model="llama"),
    streamed("double_buffer", 2, 2, debug=True, dropout=0.3, model="llama"),
    *(streamed(weights, 3, 2) for weights in ("vertical", "latest", "predict")),
    streamed("vertical", 3, 1, schedule="eager_1f1b", debug=True),
    *(streamed(weights, 2, 2, dp=2) for weights in POLICIES),
    streamed("stash", 2, 1, dp=2, zero=0, reduce_chunk_mib=0.001),
    streamed("double_buffer", 2, 2, dp=2, zero=0, masked=0.3),
    streamed("double_buffer", 2, 2, dp=2, reduce_chunk_mib=0.001, uneven=True, layers=4),
    streamed("stash", 3, 2, dp=2, in_process=True),
    streamed("double_buffer", 3, 2, tp=2, in_process=True, documents=True),
    streamed("stash", 2, 2, tp=2, sequence_parallel=True, documents=True),
    streamed("double_buffer", 2, 2, tp=2, dropout=0.3),
    streamed("latest", 2, 1, tp=2, sequence_parallel=True),
    streamed("stash", 2, 2, dp=2, rule="lamb", activations="full"),
    streamed("double_buffer", 2, 2, dp=2, rule="lars", activations="stage", offload="host"),
    streamed("vertical", 2, 2, dp=2, rule="nadamw", activations="offload"),
    streamed("double_buffer", 3, 2, tied=True),
    streamed("double_buffer", 2, 2, tied=True, dp=2, clip_scope="stage"),
    in_turns("stash", 2, 2, 1),
    in_turns("double_buffer", 4, 1, 2),
]


@in_parts(
    ("world", "every"), [(2, 1), (2, 3), (3, 1), (4, 1), (4, 4)], default=[(2, 3)], full=[(4, 4)]
)
def test_processes_train_as_the_definitions_say(world: int, every: int) -> None:
    check([case for case in SEVERAL if case.world == world][::every])


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 3])
def test_processes_train_so_in_all_sizes(pp: int) -> None:
    sizes = [(weights, m) for weights in POLICIES for m in (1, 2, 4) if legal(weights, pp, m)]
    check([streamed(weights, pp, m) for weights, m in sizes])


TIED = [
    streamed("double_buffer", 2, 1, tied=True, debug=True),
    streamed("double_buffer", 2, 2, tied=True, synchronous_steps=4),
    streamed("double_buffer", 2, 2, tied=True, clip_scope="stage", masked=0.3, rule="muon"),
    streamed("double_buffer", 2, 3, tied=True, look_ahead=1, activations="full"),
    streamed("double_buffer", 3, 4, tied=True, rule="lamb"),
    streamed("double_buffer", 2, 2, tied=True, dp=2, rule="lamb"),
    streamed("double_buffer", 2, 1, tied=True, dp=2, zero=0, clip_scope="stage"),
    streamed("double_buffer", 2, 2, tied=True, dp=2, look_ahead=1),
    streamed("double_buffer", 2, 2, tied=True, tp=2, sequence_parallel=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_tied_embeddings(world: int) -> None:
    check([case for case in TIED if case.world == world])


MOVED_BACK_OR_SYNCHRONOUS = [
    streamed("correct", 3, 2, in_process=True, schedule="eager_1f1b", rule="muon"),
    streamed(
        "correct", 2, 2, in_process=True, advance=1, loss_chunk=0, rule="lamb", offload="host"
    ),
    streamed("vertical", 2, 2, in_process=True, synchronous_steps=1, schedule="eager_1f1b"),
    streamed(
        "double_group", 2, 2, in_process=True, schedule="two_group", layers=4, synchronous_steps=5
    ),
    streamed("latest", 3, 1, in_process=True, synchronous_steps=2),
    streamed("predict", 4, 1, in_process=True, synchronous_steps=3, horizon="round_trip"),
    streamed("double_buffer", 2, 2, synchronous_steps=11, debug=True),
    streamed("correct", 3, 1, synchronous_steps=4, debug=True),
    streamed("correct", 2, 1, tp=2, sequence_parallel=True),
    streamed("correct", 2, 1, dp=2, zero=0, rule="lars", masked=0.3),
    streamed("correct", 2, 2, dp=2, offload="disk", dropout=0.3),
]


@in_parts("world", [1, 2, 3, 4], full=[4])
def test_corrections_and_synchronous_steps_with_other_things(world: int) -> None:
    check([case for case in MOVED_BACK_OR_SYNCHRONOUS if case.world == world])


@pytest.mark.slow
def test_four_ranks_move_back_and_begin_synchronously() -> None:
    check(
        [
            *(streamed("correct", 4, m, synchronous_steps=s) for m in (1, 2, 4) for s in (None, 3)),
            *(streamed(each, 4, 4, synchronous_steps=5) for each in POLICIES if each != "correct"),
        ]
    )


TRACED = {"in_process": True, "compile": True, "steps": 8}
COMPILED = [
    streamed("stash", 3, 1, **TRACED),
    streamed("vertical", 3, 2, **TRACED, model="llama", activations="full"),
    streamed("double_buffer", 2, 2, **TRACED, look_ahead=1, documents=True),
    streamed("double_group", 2, 2, **TRACED, schedule="two_group", layers=4),
]


def run_traced(world: World, cases: Sequence[Case]) -> tuple[list[StaleOutcome], list[int]]:
    """Run cases by graphs that are traced with their backward, but not compiled; return their
    counts, too."""
    outcomes, numbers = [], []
    for case in cases:
        with traced_blocks() as graphs:
            outcomes += run_stale_cases(world, [case])
        numbers.append(len(graphs))
    return outcomes, numbers


@one_of(4)
def test_compiled_blocks_keep_the_version_of_their_forward(some: slice) -> None:
    ((outcomes, numbers),) = run_world(1, run_traced, COMPILED[some], timeout_s=240)
    for case, outcome, graphs in zip(COMPILED[some], outcomes, numbers, strict=True):
        check_stale(case, [outcome])
        assert 1 <= graphs <= 5, f"{case.name}: all versions share their graphs"


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.weights)
def test_inductor_keeps_it_too(case: Case) -> None:
    (outcome,) = run_world(1, run_stale_cases, [case], timeout_s=600)
    check_stale(case, outcome)


TURNS = [
    *(in_turns("stash", m, *c) for m, c in ((4, (2, 1)), (2, (1, 2)), (4, (1, 2)))),
    *(in_turns("double_buffer", m, *c) for m, c in ((2, (2, 1)), (6, (1, 2)))),
    in_turns("stash", 2, 2, 1, clip=None, debug=True, zero=0, dropout=0.3),
    in_turns("double_buffer", 4, 1, 2, clip_scope="stage", masked=0.3, rule="lamb"),
    in_turns("stash", 2, 2, 1, 1, activations="full", rule="muon"),
    in_turns("double_buffer", 4, 2, 1, 1, look_ahead=1),
    *(in_turns(weights, 3, 3, 1) for weights in ("stash", "double_buffer")),
    in_turns("stash", 2, 2, 1, dp=2, in_process=True),
    *(in_turns(weights, 2, 2, 1, dp=2) for weights in ("stash", "double_buffer")),
]


@in_parts("world", [2, 3, 4, 6], full=[2])
def test_stages_of_several_ranks(world: int) -> None:
    check([case for case in TURNS if case.world == world])


@in_parts("weights", ["stash", "double_buffer"], full=["double_buffer"])
def test_ranks_of_a_stage_pause_together(weights: str) -> None:
    """In one process sums are of other parts, so the last bits of that are others."""
    case = in_turns(weights, 4, 2, 1, dtype="fp32", look_ahead=1)
    for plain, paused in run_world(3, in_several_ways, case):
        assert plain.losses == paused.losses
        assert plain.norms == paused.norms
        assert len(set(paused.validation.values())) == case.steps
        same_parts(trained(paused), trained(plain))


def in_several_ways(world: World, case: Case) -> list[StaleOutcome]:
    return [run_stale(world, case), run_stale(world, case, pauses=range(case.steps))]


PAUSED = [
    streamed("double_buffer", 2, 2, dtype="fp32", look_ahead=1, tied=True, debug=True),
    streamed("stash", 2, 1, batch=2),
    streamed("vertical", 2, 2, schedule="eager_1f1b", debug=True),
    streamed("latest", 2, 1, batch=2, advance=1, loss_chunk=0),
    streamed("stash", 2, 2, rule="muon", dtype="fp32", state_dtype="bf16", activations="selective"),
    streamed("predict", 2, 1, batch=2),
    streamed("correct", 2, 2, synchronous_steps=3, lr_anneal_steps=4),
    streamed("double_group", 2, 2, schedule="two_group", layers=4, dtype="bf16"),
]


@in_parts("case", PAUSED, default=8, ids=lambda case: f"{case.weights}, {case.rule}")
def test_a_run_that_pauses_at_every_step_is_the_same_to_the_bit(case: Case) -> None:
    """In as many processes and in one, with validations in between or without."""
    ranks = run_world(2, in_several_ways, case)
    (together,) = run_world(1, in_several_ways, replace(case, in_process=True))
    for plain, paused in [*ranks, together]:
        assert plain.losses == paused.losses == together[0].losses
        assert plain.norms == paused.norms == together[0].norms
        assert [*paused.known_at.values()] == [*range(case.steps)]
        assert len(set(paused.validation.values())) == case.steps
        same_parts(trained(paused), trained(plain))
        same_parts(trained(plain), trained(together[0]))
    assert ranks[0][1].validation == together[1].validation


def trained(outcome: StaleOutcome) -> dict[str, Parts]:
    """Return master weights and states at the end, without older versions."""
    return {kind: of for kind, of in outcome.values[-1].items() if kind[:6] != "stash."}


def test_results_come_when_no_rank_waits_for_them() -> None:
    case = streamed("stash", 3, 1)
    for outcome in run_world(3, run_stale, case):
        late = [known - step for step, known in outcome.known_at.items()]
        assert late[: case.steps - 2] == [2] * (case.steps - 2)


def run_newest(world: World, case: Case) -> StaleOutcome:
    """Run with stages that read their newest local weights, and take them for one version
    everywhere."""
    with async_faults.stages_read_what_is_newest_to_themselves():
        return run_stale(world, case)


@pytest.mark.parametrize("in_process", [False, True])
def test_in_debug_mode_messages_tell_which_version_was_read(in_process: bool) -> None:
    case = streamed("vertical", 2, 1, debug=True, in_process=in_process, steps=4)
    of_last = "0F0@1" if in_process else "0F0@1 of shape .* from rank 0"
    of_first = "0F0@0" if in_process else r"\[0, 0, 0, 0, 0,"
    with pytest.raises(WorldError, match=f"expected {of_last}, got {of_first}"):
        run_world(case.world, run_newest, case)


def run_plainly(world: World, case: Case) -> Outcome:
    return run_case(world, case, validate=False)


@in_parts(
    "weights", ["stash", "vertical", "latest", "predict", "correct"], default=["stash"], full=2
)
def test_one_rank_trains_as_synchronous_training_does(weights: str) -> None:
    case = streamed(weights, 1, 2, dtype="fp32")
    plain = replace(case, weights="synchronous", clip_scope="global")
    (found,), (wanted,) = run_world(1, run_stale, case), run_world(1, run_plainly, plain)
    assert [*found.losses.values()] == wanted.losses
    assert [*found.norms.values()] == wanted.norms
    same_parts(wanted.values[-1], trained(found))


@in_parts("weights", ["stash", "double_buffer", "correct"], default=["stash"], full=1)
def test_synchronous_steps_are_those_of_synchronous_training(weights: str) -> None:
    """To the bit, and their results come at once."""
    case = streamed(weights, 2, 2, dtype="fp32", in_process=True, synchronous_steps=4, clip=None)
    plain = replace(case, weights="synchronous", clip_scope="global", synchronous_steps=None)
    (found,), (wanted,) = run_world(1, run_stale, case), run_world(1, run_plainly, plain)
    assert [found.losses[step] for step in range(4)] == wanted.losses[:4]
    assert [found.norms[step] for step in range(4)] == wanted.norms[:4]
    assert [found.known_at[step] for step in range(4)] == [0, 1, 2, 3]
    assert [*found.losses.values()] != wanted.losses
    for step in range(4):
        same_parts(wanted.values[step + 1], found.values[step])


def kept(world: World, case: Case) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the bytes of weights and of main gradients, as found in storages and as planned."""
    step = begun(world, case)
    for i in range(5):
        step.train(i, Rows(case))
    weights, grads = dict[int, int](), dict[int, int]()

    def add(found: dict[int, int], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()

    assert step.streaming is not None
    for versions in step.streaming.versions():
        for buffer in (*versions.weights, *versions.predictions):
            add(weights, buffer)
        for grad in versions.accumulators:
            add(grads, grad)
        if versions.shard.link is not None:
            add(grads, versions.shard.link.arriving)
    for module in step.modules.values():
        for parameter in module.parameters():
            assert parameter.untyped_storage().data_ptr() in weights
            assert main_grad(parameter).untyped_storage().data_ptr() in grads
    plan = model_memory(step.config, step.layout, step.mesh.pp.index)
    return (sum(weights.values()), sum(grads.values())), (plan.parameters, plan.gradients)


MEMORY = [
    streamed("stash", 3, 1, dtype="bf16"),
    streamed("vertical", 3, 2, dtype="fp32"),
    streamed("double_buffer", 3, 2, dtype="fp32"),
    streamed("double_buffer", 3, 2, dtype="bf16", tied=True),
    in_turns("stash", 2, 2, 1, dtype="bf16"),
    streamed("latest", 3, 1, dtype="bf16"),
    streamed("predict", 3, 1, dtype="bf16", horizon="round_trip"),
    streamed("correct", 3, 2, dtype="bf16"),
    streamed("double_group", 3, 2, schedule="two_group", layers=6, dtype="bf16"),
]


def keep_all(world: World) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [kept(world, case) for case in MEMORY]


@pytest.mark.full
def test_weights_and_gradients_take_the_memory_that_is_planned() -> None:
    for rank in run_world(3, keep_all):
        for case, (found, planned) in zip(MEMORY, rank, strict=True):
            assert found == planned, case.name
