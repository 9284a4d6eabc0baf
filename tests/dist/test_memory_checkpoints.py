"""Copies in the memory of nodes: a run that has lost its ranks goes on from them to the bit."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megapipe.errors import CheckpointError, LaunchError
from megapipe.launch import memory_folder, progress
from megapipe.testing import World, run_world
from megapipe.train.callbacks import Callback, Run, Step
from megapipe.train.resume import memory_checkpoints
from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.poison import Poison
from tests.parity.stopped_runs import BASE, Interrupted, Play, assert_continues, play
from tests.parity.tiers import in_parts, one_of

DP3 = {"parallel.dp": "3", "train.global_batch": "9", "model.dropout": "0.1"}
TP_DP = {"parallel.tp": "2", "parallel.dp": "2", "parallel.sequence_parallel": "true"}
PP_DP = {"parallel.pp": "2", "parallel.dp": "2", "model.dropout": "0.1"}
MEMORY = {
    "checkpoint.every": "0",
    "checkpoint.every_minutes": "0",
    "checkpoint.in_memory_every": "2",
}


@dataclass(frozen=True)
class Start:
    """A start of a run on `nodes`, one letter for each rank; `first` is done before it, in the
    folder of the nodes' folders, and `before` is what the launcher asks for."""

    play: Play
    nodes: str
    first: Callable[[Path], object] | None = None
    before: int = -1


def start_all(world: World, base: Mapping[str, str], folder: str, starts: list[Start]) -> Any:
    """Play this rank's part of one start after another."""
    outcomes = []
    for each in starts:
        if world.rank == 0:
            if each.first is not None:
                each.first(Path(folder))
            told = Path(folder, "progress")
            progress.write_request(told, progress.Request(each.before))
            os.environ[progress.ENVIRONMENT] = str(told)
        os.environ[memory_folder.ENVIRONMENT] = str(Path(folder, each.nodes[world.rank]))
        outcomes.append(play(world, base, each.play))
    return outcomes


def start(folder: Path, *starts: Start) -> list[list[dict[str, Any]]]:
    """Return, for each start, what each rank shows."""
    nodes = folder / "nodes"
    nodes.mkdir()
    world = len(starts[0].nodes)
    ranks = run_world(world, start_all, {**tiny(folder), **BASE}, str(nodes), list(starts))
    return [list(outcomes) for outcomes in zip(*ranks, strict=True)]


@dataclass(frozen=True)
class Lost:
    """Empties the memory of a node."""

    node: str

    def __call__(self, folder: Path) -> None:
        shutil.rmtree(folder / self.node)


@dataclass(frozen=True)
class Flipped:
    """Changes the last byte of files in the memory of nodes."""

    pattern: str

    def __call__(self, folder: Path) -> None:
        files = list(folder.glob(self.pattern))
        assert files, self.pattern
        for path in files:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)


@dataclass(frozen=True)
class Longer:
    """Adds a byte to files in the memory of nodes."""

    pattern: str

    def __call__(self, folder: Path) -> None:
        for path in folder.glob(self.pattern):
            path.write_bytes(path.read_bytes() + b"x")


class Cut(Callback):
    """Ends all ranks inside the copy of step 4: at a phase of it that the ranks of `done` have
    done."""

    def __init__(self, phase: int, done: Collection[int]) -> None:
        self._left = phase
        self._done = done

    def before_save(self, run: Run, step: int) -> None:
        if step == 4:
            self._real = memory_checkpoints.run_on_all
            memory_checkpoints.run_on_all = self._together

    def _together(self, group: Any, work: Callable[[], object]) -> object:
        if self._left:
            self._left -= 1
            return self._real(group, work)
        memory_checkpoints.run_on_all = self._real
        if group.rank in self._done:
            work()
        raise Interrupted


CASES = {
    "tp2 dp2": (TP_DP, "AABB", "AABB", "A"),
    "pp2 dp2 zero 3": ({**PP_DP, "optimizer.zero": "3"}, "AABB", "BBAA", "B"),
    "three replicas on uneven nodes": (DP3, "AAB", "AAB", "A"),
    "three replicas on one node": (DP3, "AAA", "AAA", None),
    "three replicas on three nodes": (DP3, "ABC", "ABC", "B"),
    "pp2 dp2 zero 0": ({**PP_DP, "optimizer.zero": "0"}, "ABAB", "AABB", "A"),
    "pp2 dp2 bf16": ({**PP_DP, "model.dtype": "bf16", "optimizer.zero": "2"}, "AABB", "AABB", "A"),
    "post-validation": ({**PP_DP, "optimizer.post_validation": "true"}, "AABB", "AABB", "B"),
}
"""Cases: settings, nodes before and after, and the one whose memory is lost in between."""


@in_parts("case", CASES, full=["pp2 dp2 zero 3"])
def test_it_goes_on_from_memory(case: str, tmp_path: Path) -> None:
    """Killed after step 5, with a copy of step 4 and nothing on a disk."""
    given, before, after, lost = CASES[case]
    behind = {**MEMORY, **given}
    whole, _, again = start(
        tmp_path,
        Start(Play("whole", {**behind, "checkpoint.in_memory_every": "0"}), before),
        Start(Play("cut", behind, stop_after=5), before),
        Start(Play("cut", behind), after, first=Lost(lost) if lost else None),
    )
    assert {rank["first_step"] for rank in again} == {4}
    assert_continues(again, whole)


LEFT = {
    "one copy of two is damaged": (Flipped("A/step-00000004-*/*.safetensors"), 4),
    "its receipt is damaged too": (Flipped("A/step-00000004-*/receipt*"), 4),
    "one copy of two is longer": (Longer("A/step-00000004-*/*.safetensors"), 4),
    "all copies of a shard are damaged": (Flipped("*/step-00000004-*/00001*.safetensors"), 2),
    "all are damaged": (Flipped("*/step-*/00001*.safetensors"), 0),
    "no node has the facts": (Flipped("*/step-00000004-*/facts.json"), 2),
}
"""Cases: what is done to the copies of steps 2 and 4 on two nodes, and from which the run goes
on."""


@one_of(6)
def test_damaged_copies_are_passed_over(some: slice, tmp_path: Path) -> None:
    left = [*LEFT.values()][some]
    behind = {**MEMORY, "parallel.dp": "2"}
    starts = [Start(Play("whole", {**behind, "checkpoint.in_memory_every": "0"}), "AB")]
    for number, (harm, _) in enumerate(left):
        cut = Start(Play(f"cut-{number}", behind, stop_after=5), "AB", first=Emptied())
        starts += [cut, Start(Play(f"cut-{number}", behind), "AB", first=harm)]
    whole, *rest = start(tmp_path, *starts)
    for again, (_, step) in zip(rest[1::2], left, strict=True):
        assert {rank["first_step"] for rank in again} == {step}
        assert_continues(again, whole)


@dataclass(frozen=True)
class Emptied:
    """Removes all that earlier runs have left in memory."""

    def __call__(self, folder: Path) -> None:
        for node in folder.glob("[A-Z]"):
            shutil.rmtree(node)


INSIDE = {
    "nothing is written": ("ABC", 1, (), 2),
    "one rank has written": ("ABC", 1, (1,), 2),
    "all have written, none has sent": ("ABC", 2, (), 2),
    "one node of three has made it a copy": ("ABC", 3, (0,), 2),
    "one node of two has": ("AAB", 3, (2,), 4),
    "two of three have": ("ABC", 3, (0, 2), 4),
}
"""Cases: nodes, the phase of the copy of step 4, ranks that have done it, and the step of the copy
from which the run goes on."""


@pytest.mark.slow
def test_killed_inside_of_a_copy(tmp_path: Path) -> None:
    behind = {**MEMORY, **DP3}
    starts = [Start(Play("whole", {**behind, "checkpoint.in_memory_every": "0"}), "AAA")]
    for number, (nodes, phase, done, _) in enumerate(INSIDE.values()):
        inside = Play(f"cut-{number}", behind, callbacks=(Cut(phase, done),))
        starts += [Start(inside, nodes, first=Emptied())]
        starts += [Start(Play(f"cut-{number}", behind), nodes)]
    whole, *rest = start(tmp_path, *starts)
    for again, (*_, step) in zip(rest[1::2], INSIDE.values(), strict=True):
        assert {rank["first_step"] for rank in again} == {step}
        assert_continues(again, whole)


@pytest.mark.full
def test_the_newer_one_is_taken_and_an_older_one_where_starts_fail(tmp_path: Path) -> None:
    """Checkpoints on the disk compete with copies in memory, which do not move the pointer."""
    behind = {**MEMORY, "parallel.dp": "2", "checkpoint.keep": "1"}
    on_disk = {**behind, "checkpoint.every": "3"}
    play = Play("run", behind)
    whole, first, older, oldest, _, newest, last = start(
        tmp_path,
        Start(Play("whole", {**behind, "checkpoint.in_memory_every": "0"}), "AB"),
        Start(Play("run", on_disk, stop_after=5), "AB"),  # 2, 4 in memory, 3 on the disk
        Start(Play("run", on_disk, stop_after=4), "AB", before=4),
        Start(Play("run", behind, stop_after=4), "AB", before=3),
        Start(Play("run", on_disk, stop_after=7), "AB", first=Emptied()),  # 6 in both
        Start(Play("run", behind, stop_after=7), "AB", before=0),
        Start(play, "AB", before=3),
    )
    steps = [run[0]["first_step"] for run in (first, older, oldest, newest, last)]
    assert steps == [0, 3, 2, 6, 6], "the last one has no older one"
    assert_continues(last, whole)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["all", "weights"])
def test_what_a_run_has_begun_with_is_not_loaded_again(what: str, tmp_path: Path) -> None:
    """Given a copy of its own and the checkpoint of another run, a run goes on with its own."""
    behind = {**MEMORY, "parallel.dp": "2", "checkpoint.load_only": what}
    behind["checkpoint.load"] = str(tmp_path / "runs/other")
    other = {"parallel.dp": "2", "checkpoint.every": "2", "run.seed": "5"}
    _, whole, first, again = start(
        tmp_path,
        Start(Play("other", other, stop_after=2), "AB"),
        Start(Play("whole", {**behind, "checkpoint.in_memory_every": "0"}), "AB"),
        Start(Play("cut", behind, stop_after=5), "AB"),
        Start(Play("cut", behind), "AB"),
    )
    steps = [run[0]["first_step"] for run in (whole, first, again)]
    assert steps == ([2, 2, 4] if what == "all" else [0, 0, 4])
    assert_continues(again, whole)


@pytest.mark.slow
def test_another_layout_another_run_and_no_copies(tmp_path: Path) -> None:
    """A copy is a checkpoint: a layout of four ranks takes it up that was written by another. One
    of another run is not taken up, nor any where the key is 0 by now."""
    dp, tp = {**MEMORY, "parallel.dp": "4"}, {**MEMORY, **TP_DP}
    none = {**dp, "checkpoint.in_memory_every": "0"}
    whole, _, changed, other, off, on = start(
        tmp_path,
        Start(Play("whole", {**tp, "checkpoint.in_memory_every": "0"}), "AABB"),
        Start(Play("run", dp, stop_after=5), "AABB"),
        Start(Play("run", tp, stop_after=7), "AABB", first=Lost("B")),  # 4, 6 in memory
        Start(Play("other", tp, stop_after=3), "AABB"),
        Start(Play("other", {**none, **TP_DP}, stop_after=1), "AABB"),
        Start(Play("other", tp), "AABB"),
    )
    assert {rank["first_step"] for rank in changed} == {4}
    for step, result in changed[0]["steps"].items():
        assert result.loss == pytest.approx(whole[0]["steps"][step].loss, rel=1e-4)
    assert [run[0]["first_step"] for run in (other, off, on)] == [0, 0, 0]
    assert_continues(on, whole)


BAD = (43, 44)
"""Samples of step 6."""


class Left(Callback):
    """Ends all ranks before the first step after going back."""

    def __init__(self) -> None:
        self._back = False

    def after_rewind(self, run: Run, step: int) -> None:
        self._back = True

    def before_step(self, run: Run, step: Step) -> None:
        if self._back:
            raise Interrupted


@pytest.mark.slow
def test_a_run_that_has_gone_back_does_not_take_up_what_it_has_left(tmp_path: Path) -> None:
    """Copies of steps after the checkpoint have samples that are now left out."""
    given = {
        **MEMORY,
        "parallel.dp": "2",
        "checkpoint.every": "3",
        "checkpoint.in_memory_every": "1",
    }
    given |= {"health.non_finite": "rewind"}
    poison = Poison("loss", 1, *BAD)
    whole, cut, again = start(
        tmp_path,
        Start(Play("whole", given, callbacks=(poison,)), "AB"),
        Start(Play("run", given, callbacks=(poison, Left())), "AB"),
        Start(Play("run", given, callbacks=(poison,)), "AB"),
    )
    assert sorted(cut[0]["steps"]) == [1, 2, 3, 4, 5]
    assert {rank["first_step"] for rank in again} == {3}
    assert_continues(again, whole)


class Broken(Lost):
    """And rank 0 cannot write all of the files that it is sent next."""

    def __call__(self, folder: Path) -> None:
        super().__call__(folder)
        real = memory_checkpoints.exchange_files

        def exchange(*given: Any) -> Any:
            memory_checkpoints.exchange_files = real
            real(*given)
            raise OSError(errno.EIO, "Input/output error", "/dev/shm/x")

        memory_checkpoints.exchange_files = exchange


@pytest.mark.slow
def test_files_that_cannot_be_brought(tmp_path: Path) -> None:
    """The start fails as one that has lost a peer, and the next takes the copy before."""
    given = {**MEMORY, "parallel.dp": "2"}
    whole, _, broken, again = start(
        tmp_path,
        Start(Play("whole", {**given, "checkpoint.in_memory_every": "0"}), "AB"),
        Start(Play("run", given, stop_after=5), "AB"),
        Start(Play("run", given), "AB", first=Broken("A")),
        Start(Play("run", given), "AB"),
    )
    for rank in broken:
        kind, text = rank["error"]
        assert kind is LaunchError
        assert "step 4 cannot be sent to all nodes: /dev/shm/x: Input/output" in text
    assert {rank["first_step"] for rank in again} == {2}
    assert_continues(again, whole)


class Full(Callback):
    """Rank 1 cannot write the copy of step 4."""

    def before_save(self, run: Run, step: int) -> None:
        if step == 4 and run.mesh.rank == 1:
            self._real = memory_checkpoints.write
            memory_checkpoints.write = self._fail

    def _fail(self, *_: object, **__: object) -> None:
        memory_checkpoints.write = self._real
        raise OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x")


class Small(Callback):
    """The memory of rank 1 has 1 kB left."""

    def begin(self, run: Run) -> None:
        if run.mesh.rank == 1:
            usage = shutil.disk_usage("/")._replace(free=1000)
            shutil.disk_usage = lambda path: usage


@pytest.mark.full
def test_without_room(tmp_path: Path) -> None:
    """A copy that cannot be written is told, and the run goes on; where it is known beforehand that
    two have no room there is one line."""
    given = {**MEMORY, "parallel.dp": "2"}
    whole, _, again, small = start(
        tmp_path,
        Start(Play("whole", {**given, "checkpoint.in_memory_every": "0"}), "AB"),
        Start(Play("run", given, stop_after=5, callbacks=(Full(),)), "AB"),
        Start(Play("run", given), "AB"),
        Start(Play("small", given, callbacks=(Small(),)), "AB"),
    )
    assert {rank["first_step"] for rank in again} == {2}
    assert_continues(again, whole)
    records = map(json.loads, (tmp_path / "runs/run/log.jsonl").read_text().splitlines())
    told = [
        each["text"]
        for each in records
        if "no in-memory checkpoint of step" in each.get("text", "")
    ]
    (line,) = told
    assert line == (
        "no in-memory checkpoint of step 4: checkpoint not saved: rank 1: /dev/shm/x: No "
        "space left on device"
    )
    for rank in small:
        kind, text = rank["error"]
        assert kind is CheckpointError
        assert re.search(
            r"nodes has 1e-06 GB free, and checkpoint.in_memory_every takes .* GB for ", text
        )


@pytest.mark.full
def test_without_a_launcher(tmp_path: Path) -> None:
    given = {**tiny(tmp_path), "checkpoint.in_memory_every": "2"}
    outcome = run_forked(tmp_path, 1, *arguments(given))
    outcome.assert_one_line(2, "checkpoint.in_memory_every=2 needs a folder", "--max-restarts N")
