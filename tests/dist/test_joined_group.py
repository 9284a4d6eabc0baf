"""megapipe.train in a process group of the caller's, as in a worker of Ray's TorchTrainer."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megapipe
from megapipe.errors import MegapipeError
from megapipe.testing import World, run_world
from tests.unit.train.objects import Counting, layers, settings


def told(rank: int, world: int) -> dict[str, str]:
    """Return the variables that Ray sets in a worker."""
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": "1", **local}


def in_thread(config: dict[str, Any], data: type[Counting] = Counting) -> str:
    """Train in a thread that is not the main one, as Ray's are; return the run's folder, or its
    error."""
    found: list[str] = []

    def train() -> None:
        try:
            found.append(str(megapipe.train(config, model=layers, data=data)))
        except MegapipeError as error:
            found.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return found[0]


def losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "step"]


def sum_of_ranks() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def worker(world: World, folder: str, given: dict[str, Any]) -> list[Any]:
    os.environ.update(told(world.rank, world.size))
    config = settings(Path(folder)) | given
    found: list[Any] = []
    for _ in range(2):
        found += [in_thread(config), sum_of_ranks()]
    return found


def test_a_run_takes_the_group_that_is_there_and_leaves_it(tmp_path: Path) -> None:
    over_ranks = {"pipeline": {"transport": "process_group"}}
    for first, *rest in run_world(2, worker, str(tmp_path / "ranks"), over_ranks):
        second = "RendezvousError: this process group has already had a megapipe run: make a new"
        assert rest[0] == rest[2] == 2.0
        assert rest[1].startswith(second)
        run = Path(first)
    alone = megapipe.train(settings(tmp_path / "alone"), model=layers, data=Counting)
    assert losses(run) == losses(alone)


class Nothing(Counting):
    def __len__(self) -> int:
        return 0


def worker_without_data(world: World, folder: str) -> list[Any]:
    os.environ.update(told(world.rank, world.size))
    config = settings(Path(folder)) | {"pipeline": {"transport": "process_group"}}
    return [in_thread(config, Nothing), sum_of_ranks()]


def test_an_error_is_raised_and_leaves_the_group(tmp_path: Path) -> None:
    for error, total in run_world(2, worker_without_data, str(tmp_path)):
        assert error.startswith("DataError: ")
        assert total == 2.0


def without_variables(world: World, folder: str) -> list[str]:
    """Train in a group that no variables describe, that those of another job do, or of another
    backend."""
    config = settings(Path(folder)) | {"pipeline": {"transport": "process_group"}}
    found = [in_thread(config)]
    os.environ.update(told(world.rank, world.size + 1))
    found.append(in_thread(config))
    os.environ.update(told(world.rank, world.size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    found.append(in_thread(config))
    os.environ.update(told(world.rank, world.size))
    dist.get_backend = lambda *_: "nccl"
    return [*found, in_thread(config)]


def test_a_group_that_cannot_be_taken_is_told_in_one_line(tmp_path: Path) -> None:
    for *unknown, other in run_world(2, without_variables, str(tmp_path)):
        for line in unknown:
            assert line.startswith(
                "RendezvousError: this process is already in a process group, and"
            )
            assert line.endswith("or call outside of any group and of megapipe.spawn")
        assert other == (
            "LaunchError: the existing process group has backend nccl, but this run needs "
            "gloo: make it with backend=gloo"
        )


def test_a_worker_alone_may_have_several_runs(tmp_path: Path) -> None:
    (found,) = run_world(1, worker, str(tmp_path), {"train.steps": 4})
    assert found == [str(tmp_path / "run"), 1.0] * 2
