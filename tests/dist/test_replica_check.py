"""A bit that flips in a copy of what several ranks hold is noticed, in every layout."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.errors import DeviceFault
from megapipe.optim.replica_check import HeldReplica, ReplicaCheck
from megapipe.testing import World, run_world
from megapipe.train.callbacks import Callback, Run, Step
from tests.parity.cases import END
from tests.parity.ranks import Case, Rows, configure
from tests.parity.stopped_runs import DP, STEPS, Play, checkpoint, run

pytestmark = pytest.mark.full

CASES = {
    "dp2 pp2 zero 0": Case(dp=2, pp=2, zero=0, dtype="fp32"),
    "dp2 tp2": Case(dp=2, tp=2, zero=1, dtype="bf16", sequence_parallel=True),
    "dp4 zero 2": Case(dp=4, zero=2, dtype="bf16"),
    "dp2 tp2 zero 3": Case(dp=2, tp=2, zero=3, chunks=2, schedule="breadth_first", dtype="fp32"),
    "dp4 hybrid": Case(dp=4, zero=3, shard_size=2, dtype="fp32"),
    "tp2 pp2 tied": Case(tp=2, pp=2, dtype="fp64", sequence_parallel=True, model="llama"),
    "dp2 pp2 chimera": Case(dp=2, pp=2, m=2, schedule="chimera", dtype="fp32"),
    "tp2 pp2 chimera zero 0": Case(tp=2, pp=2, m=2, schedule="chimera", zero=0, dtype="fp32"),
    "dp2 tp2 stochastic": Case(dp=2, tp=2, zero=0, dtype="bf16", master="none", state_dtype="bf16"),
    "tp2 dp2 muon": Case(tp=2, dp=2, rule="muon", dtype="fp32"),
    "dp2 pp2 in host memory": Case(dp=2, pp=2, zero=0, dtype="bf16", offload="host"),
    "dp2 tp2 post-validation": Case(dp=2, tp=2, post_validation=True, dtype="fp32"),
    "dp2 tp2 adapters": Case(dp=2, tp=2, lora="all", dtype="fp32"),
    "dp4 experts": Case(dp=4, ep=4, moe="top 2", placement="changing", dtype="fp32", layers=2),
    "tp2 dp2 parts of experts": Case(
        tp=2,
        dp=2,
        sequence_parallel=True,
        ep=2,
        etp=2,
        moe="top 2",
        placement="changing",
        dtype="bf16",
        layers=2,
        zero=0,
    ),
}


def flip(values: Tensor, place: int, bit: int) -> None:
    raw = values.view(torch.uint8)
    raw[place * values.element_size() + bit // 8] ^= 1 << bit % 8


def flipped(world: World, case: Case) -> dict[str, Any]:
    """Return the mismatches that are reported: before any flip, and after each one, which is taken
    back."""
    config, layout = configure(case)
    mesh = world.mesh(case.grid)
    step, rows = TrainStep(config, layout, mesh, document_end=END), Rows(case)
    for number in range(case.steps):
        step.train(number, rows)
    step.settle()
    copies = ReplicaCheck(step.optimizer, mesh)
    experts = [each for each in copies.shared if isinstance(each, HeldReplica)]
    seen: dict[str, Any] = {
        "experts": len(experts),
        "kinds": {each.kind for each in copies.shared},
        "whole": copies.first_mismatch(),
        "own": {},
        "told": [],
    }
    for turn in range(2 * world.size):
        draw = random.Random(f"{case.name} {turn}")
        mine = mesh.rank == turn % world.size and bool(copies.shared)
        if mine:
            chosen = draw.choice(experts or copies.shared)
            values = chosen.read()
            place, bit = draw.randrange(len(values)), draw.randrange(8 * values.element_size())
            kind = {"model": "master weights"}.get(chosen.kind, chosen.kind)
            if isinstance(chosen, HeldReplica):
                where, name = "stage 0", chosen.tensor.words
            else:
                spec, stage = chosen.entry.spec, chosen.shard.bucket.index
                where, name = "the tied embedding" if spec.tied else f"stage {stage}", spec.name
            seen["own"][turn] = f"{kind} of {name} ({where})"
            flip(values, place, bit)
        seen["told"].append(copies.first_mismatch())
        if mine:
            flip(values, place, bit)
    seen["restored"] = copies.first_mismatch()
    return seen


def all_flipped(world: World, names: list[str]) -> list[dict[str, Any]]:
    return [flipped(world, CASES[name]) for name in names]


STATES = {"exp_avg", "exp_avg_sq"}
KINDS = {
    "dp2 pp2 zero 0": {"weights", *STATES},
    "dp2 tp2": {"weights", "model", *STATES},
    "dp4 zero 2": {"weights"},
    "dp2 tp2 zero 3": {"weights", *STATES},
    "dp4 hybrid": {"weights", *STATES},
    "tp2 pp2 chimera zero 0": {"weights", *STATES},
    "dp2 tp2 stochastic": {"weights", *STATES},
    "dp2 pp2 in host memory": {"weights", "model", *STATES},
}


def test_a_flipped_bit_is_noticed_and_its_rank_is_named(tmp_path: Path) -> None:
    """On each rank, at random places of random copies; and nothing is told where none flipped."""
    names = list(CASES)
    ranks = run_world(4, all_flipped, names)
    alone = agreed = 0
    for name, *of_ranks in zip(names, *ranks, strict=True):
        for seen in of_ranks:
            assert seen["whole"] is seen["restored"] is None, name
            assert seen["told"] == of_ranks[0]["told"]
        assert any(seen["experts"] for seen in of_ranks) == ("experts" in name)
        kinds = set().union(*(seen["kinds"] for seen in of_ranks))
        assert kinds == KINDS.get(name, kinds)
        for turn, text in enumerate(of_ranks[0]["told"]):
            rank = turn % len(of_ranks)
            if not of_ranks[rank]["kinds"]:
                assert text is None, "it has its slices alone"
                continue
            what, _, who = text.partition(": ")
            assert what == of_ranks[rank]["own"][turn]
            if who.startswith(f"rank {rank} differs from "):
                alone += 1
            else:
                assert str(rank) in who.removeprefix("ranks ").split(" differ")[0].split(", ")
                assert who.endswith(" differ, and no rank is in a minority")
                agreed += 1
    assert alone > 10
    assert agreed > 10


@dataclass
class Flip(Callback):
    """Flips a bit on a rank after a step."""

    step: int
    rank: int
    kind: str

    def after_step(self, run: Run, step: Step) -> None:
        if step.number != self.step or run.mesh.rank != self.rank:
            return
        run.train_step.optimizer.await_all_weights()
        for shard in run.train_step.optimizer.shards:
            whole = self.kind == "weights"
            flip(shard.weights if whole else shard.store.read(self.kind, 0, 8), 3, 9)


@pytest.mark.slow
def test_a_run_ends_before_it_saves_what_differs(tmp_path: Path) -> None:
    """With an exit code after which a launcher starts it again, from the checkpoint before."""
    given = {
        **DP,
        "optimizer.zero": "0",
        "checkpoint.every": "2",
        "checkpoint.async_save": "true",
        "health.replica_check_every": "3",
    }
    state = Flip(5, 2, "exp_avg")
    weights = Flip(3, 0, "weights")
    flipped, early, again, fine = run(
        tmp_path,
        Play("flipped", given, callbacks=(state,)),
        Play("early", given, callbacks=(weights,)),
        Play("flipped", given),
        Play("fine", given),
    )
    for ranks, number, wrong in ((flipped, 6, 2), (early, 3, 0)):
        kinds, texts = zip(*(rank["error"] for rank in ranks), strict=True)
        assert set(kinds) == {DeviceFault}
        (text,) = set(texts)
        assert text.startswith(f"step {number}: ")
        assert (
            f": rank {wrong} differs from 3 others, but replicas of a value must be equal" in text
        )
        assert text.endswith("without that device if it happens again")
    assert not checkpoint(tmp_path, "early", 4).exists()
    assert not checkpoint(tmp_path, "flipped", 6).with_suffix(".1").exists()
    assert again[0]["first_step"] == 4
    for mine, theirs in zip(again, fine, strict=True):
        assert mine["error"] is None
        assert all(result == theirs["steps"][step] for step, result in mine["steps"].items())


@dataclass
class FlipExpert(Callback):
    """Flips a bit of an expert replica on a rank after a step, when replicas have come."""

    step: int
    rank: int

    def after_step(self, run: Run, step: Step) -> None:
        if step.number != self.step:
            return
        optimizer = run.train_step.optimizer
        optimizer.await_all_weights()
        if run.mesh.rank == self.rank:
            places = next(
                each for (each, *_) in optimizer.replicas.values() if each.replicas_per_rank
            )
            *_, (_, _, values) = places.replicated_weights()
            flip(values.view(-1), 2, 7)


def test_a_run_ends_where_a_copy_of_an_expert_differs(tmp_path: Path) -> None:
    """And goes through where none does, whatever copies there are."""
    given = {
        "model.layers": "2",
        "model.moe.num_experts": "8",
        "parallel.dp": "4",
        "parallel.ep": "4",
        "experts.rebalance": "balance",
        "experts.replica_slots": "2",
        "experts.rebalance_every": "1",
        "health.replica_check_every": "1",
        "checkpoint.every": "0",
    }
    flipped, fine = run(
        tmp_path,
        Play("flipped", given, callbacks=(FlipExpert(3, 1),)),
        Play("fine", given),
    )
    for kind, text in (rank["error"] for rank in flipped):
        assert kind is DeviceFault
        assert text.startswith("step 3: weights of layers.0.moe.")
        assert ", expert " in text
    assert [rank["error"] for rank in fine] == [None] * 4
    assert max(fine[0]["steps"]) == STEPS
