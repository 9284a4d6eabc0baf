"""Devices by their identities: the backend follows from who shares one, not from counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore

from megapipe.config.parallel import ParallelConfig
from megapipe.errors import ConfigError, LaunchError
from megapipe.launch.devices import CPU, DeviceReport, choose_device, decide, mig_of
from megapipe.launch.launch_info import LaunchInfo
from tests.parity.threads import at_once

AUTO = ParallelConfig(timeout_s=10.0)
NCCL = AUTO.model_copy(update={"backend": "nccl"})


class Visible:
    """Devices that one process sees, by identity."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def count(self) -> int:
        return len(self.names)

    def identity(self, index: int) -> str:
        return self.names[index]


def start(
    parallel: ParallelConfig, visible: Sequence[Sequence[str]], per_host: int | None = None
) -> list[Any]:
    """Return what each of several processes chooses or raises; they see these devices."""
    store, world = HashStore(), len(visible)
    local = per_host or world

    def on_rank(rank: int) -> tuple[str, str]:
        info = LaunchInfo(rank, world, rank % local, local)
        device, backend = choose_device(parallel, info, store, Visible(visible[rank]))
        return str(device), backend

    return at_once(world, on_rank)


@pytest.mark.parametrize("parallel", [AUTO, NCCL], ids=["auto", "nccl"])
@pytest.mark.parametrize(
    ("visible", "per_host", "indices"),
    [
        ([[f"GPU-{i}"] for i in range(8)], 8, [0] * 8),  # srun --gpus-per-task=1
        ([[f"GPU-{i}" for i in range(8)]] * 8, 8, list(range(8))),  # torchrun
        ([[f"GPU-{2 * i}", f"GPU-{2 * i + 1}"] for i in range(4)], 4, [0, 1, 0, 1]),
        ([["GPU-a", "GPU-b"]] * 2 + [["GPU-c", "GPU-d"]] * 2, 2, [0, 1, 0, 1]),  # two hosts
        ([["GPU-a"]], 1, [0]),
        ([["MIG-a"], ["MIG-b"]], 2, [0, 0]),
    ],
    ids=["one each", "eight each", "two each", "two hosts", "alone", "parts of one"],
)
def test_a_device_each_is_for_nccl(
    parallel: ParallelConfig, visible: list[list[str]], per_host: int, indices: list[int]
) -> None:
    expected = [(f"cuda:{index}", "nccl") for index in indices]
    assert start(parallel, visible, per_host) == expected


SHARING = [
    [["GPU-a"], ["GPU-a"]],
    [["GPU-a", "GPU-b"]] * 3,
    [["GPU-a", "GPU-b"], ["GPU-b", "GPU-a"]],  # each takes the one of its local rank
    [["MIG-a"], ["MIG-b"], ["MIG-b"]],
]


@pytest.mark.parametrize("visible", SHARING)
def test_who_shares_a_device_talks_over_gloo_or_is_refused(visible: list[list[str]]) -> None:
    assert {backend for _, backend in start(AUTO, visible)} == {"gloo"}
    errors = start(NCCL, visible)
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, ConfigError) for error in errors)
    assert "parallel.backend=nccl needs a GPU per process, and ranks " in str(errors[0])


@pytest.mark.parametrize("visible", SHARING)
def test_gloo_in_the_place_of_nccl_is_one_warning(
    visible: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    start(AUTO.model_copy(update={"backend": "gloo"}), visible)
    assert not caplog.messages
    start(AUTO, visible)
    (message,) = caplog.messages
    assert "using gloo through host memory: NCCL needs one GPU per process, and r" in message
    assert f"{len(visible)} processes for " in message


def test_the_line_names_ranks_host_and_device() -> None:
    found = [
        DeviceReport(0, "n1", "GPU-a"),
        DeviceReport(1, "n1", "GPU-b"),
        DeviceReport(2, "n2", "GPU-b"),
    ]
    with pytest.raises(ConfigError, match="ranks 1 and 2 on n2 share GPU-b: 3 processes for 2 GPU"):
        decide(NCCL, found)


def test_processes_without_devices() -> None:
    assert start(AUTO, [[], []]) == [("cpu", "gloo")] * 2
    for error in start(NCCL, [[], []]):
        assert isinstance(error, ConfigError)
        assert str(error) == "parallel.backend=nccl needs CUDA devices; use auto or gloo"
    (error,) = start(AUTO.model_copy(update={"device": "cuda"}), [[]])
    assert isinstance(error, ConfigError)
    assert "parallel.device=cuda, but torch sees no CUDA device; use auto or cpu" in str(error)


def test_one_process_without_a_device() -> None:
    for error in start(AUTO, [["GPU-a"], [], ["GPU-c"]]):
        assert isinstance(error, LaunchError)
        assert "rank 1 on " in str(error)
        assert " sees no CUDA device, rank 0 on " in str(error)
    found = [DeviceReport(0, "n1", "GPU-a"), DeviceReport(1, "n2", CPU)]
    with pytest.raises(LaunchError, match="rank 1 on n2 sees no CUDA device, rank 0 on n1 does"):
        decide(AUTO, found)
    with pytest.raises(ConfigError, match="no CUDA device on rank 1"):
        decide(AUTO.model_copy(update={"device": "cuda"}), found)


def test_the_cpu_asks_nobody() -> None:
    info = replace(LaunchInfo(), world=2)
    device, backend = choose_device(AUTO.model_copy(update={"device": "cpu"}), info, HashStore())
    assert (str(device), backend) == ("cpu", "gloo")


def test_gloo_stays_gloo() -> None:
    gloo = AUTO.model_copy(update={"backend": "gloo"})
    assert start(gloo, [["GPU-a"], ["GPU-b"]]) == [("cuda:0", "gloo")] * 2


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [
        ("MIG-5f", 0, "MIG-5f"),
        ("0,1", 1, None),
        ("GPU-7a, MIG-5f", 1, "MIG-5f"),
        ("", 0, None),
        ("MIG-5f", 3, None),
    ],
)
def test_parts_of_a_gpu_are_known_by_how_they_are_made_visible(
    visible: str, index: int, expected: str | None
) -> None:
    assert mig_of({"CUDA_VISIBLE_DEVICES": visible}, index) == expected
