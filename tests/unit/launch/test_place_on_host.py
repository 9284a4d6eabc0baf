"""Ranks that no launcher has told their places on their hosts, with threads for processes."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

from megapipe.config.parallel import ParallelConfig
from megapipe.errors import LaunchError
from megapipe.launch import rendezvous
from megapipe.launch.devices import choose_device
from megapipe.launch.launch_info import LaunchInfo, find_launch_info
from tests.parity.threads import at_once


def places(
    hosts: list[str], monkeypatch: pytest.MonkeyPatch, **given: dict[str, str]
) -> list[LaunchInfo]:
    """Return the places of ranks on these hosts; `given` has variables of some, by `rank0`, ..."""
    store, world = HashStore(), len(hosts)
    monkeypatch.setattr(rendezvous, "machine", lambda: hosts[own.rank])
    own = threading.local()

    def place(rank: int) -> LaunchInfo:
        own.rank = rank
        pod = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "job-master-0"}
        info = find_launch_info(pod | given.get(f"rank{rank}", {}))
        return rendezvous.place_on_host(store, info, 20)

    return at_once(world, place)


def test_pods_with_a_process_each_and_hosts_with_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pods = places(["pod0", "pod1", "pod2"], monkeypatch)
    assert [(info.rank, info.local_rank, info.local_world) for info in pods] == [
        (rank, 0, 1) for rank in range(3)
    ]
    assert not any(info.guessed for info in pods)
    mixed = places(["a", "b", "a", "b", "b"], monkeypatch, rank4={"LOCAL_RANK": "7"})
    assert [(info.local_rank, info.local_world) for info in mixed] == [
        *((0, 2), (0, 3), (1, 2), (1, 3)),
        (7, 3),  # as it was told
    ]


class Several:
    """The devices of a pod, of which only one is used."""

    def __init__(self, pod: int) -> None:
        self.pod = pod

    def count(self) -> int:
        return 4

    def identity(self, index: int) -> str:
        return f"pod {self.pod} GPU {index}"


def test_each_pod_computes_on_its_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pods, store = places(["pod0", "pod1"], monkeypatch), HashStore()
    nccl = ParallelConfig(backend="nccl", timeout_s=10.0)
    found = at_once(2, lambda rank: choose_device(nccl, pods[rank], store, Several(rank)))
    assert [str(device) for device, _ in found] == ["cuda:0", "cuda:0"]


def test_threads_of_several_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were taken for ranks of hosts of their own when torch was loaded."""
    monkeypatch.setenv("OMP_NUM_THREADS", "to be restored")
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    for hosts in (["pod0", "pod1"], ["a", "a"]):
        assert not set_to
        os.environ.pop("OMP_NUM_THREADS", None)
        places(hosts, monkeypatch)
    assert set(set_to) == {1}
    assert os.environ["OMP_NUM_THREADS"] == "1"
    set_to.clear()
    places(["a", "a"], monkeypatch)
    assert not set_to, "who starts them has said how many"


def test_a_master_that_others_reach_through_a_service_is_known_by_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    master = {"MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
    first, second = places(["pod0", "pod1"], monkeypatch, rank0=master)
    assert (first.address, first.local_world) == ("127.0.0.1", 1)
    assert second.address == "job-master-0"
    first, _ = places(["pod0", "pod0"], monkeypatch, rank0=master)
    assert (first.address, first.local_world) == ("localhost", 2)


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    info = LaunchInfo(1, 3, launched=True, guessed=("local_rank", "local_world"))
    with pytest.raises(LaunchError, match=r"^1 of 3 ranks arrived within 1 s .*not ranks 0, 2: "):
        rendezvous.place_on_host(HashStore(), info, 1)
    told = replace(info, guessed=())
    assert rendezvous.place_on_host(HashStore(), told, 1) == told
