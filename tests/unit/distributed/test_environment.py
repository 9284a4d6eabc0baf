"""What is set for CUDA, NCCL and torch: defaults give way, and one value is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megapipe.distributed import mesh
from megapipe.distributed.environment import set_environment
from megapipe.errors import LaunchError


def made(
    given: dict[str, str], *, messages: bool = True, exact: bool = False, driver: int = 0
) -> dict[str, str]:
    environ = dict(given)
    set_environment(environ, sends_messages=messages, deterministic=exact, driver=lambda: driver)
    assert environ.items() >= given.items(), "what is set stays"
    return environ


def test_defaults() -> None:
    assert made({}) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_MODULE_LOADING": "EAGER",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "KINETO_LOG_LEVEL": "6",
    }
    assert made({}, exact=True)["NCCL_ALGO"] == "Ring"


def test_kernels_of_all_communicators_start_in_order_if_the_driver_knows_when_they_do() -> None:
    """Otherwise NCCL would have each kernel wait for the end of the one before."""
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    for driver, found in ((0, None), (12020, None), (12030, "1"), (13000, "1")):
        assert made({}, driver=driver).get(name) == found
    assert made({name: "0"}, driver=12030)[name] == "0"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_is_configured_stays_so(name: str) -> None:
    environ = made({name: "max_split_size_mb:128"})
    assert [key for key in environ if "ALLOC_CONF" in key] == [name]


def test_one_queue_is_refused_where_messages_are_sent() -> None:
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    made(one, messages=False)
    made({"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    with pytest.raises(LaunchError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1 puts .*: expected 32"):
        made(one)


@pytest.mark.parametrize(
    ("said", "gloo"), [("lo", "lo"), ("=lo", "lo"), ("^lo", None), ("l", None), ("lo,eth9", None)]
)
def test_gloo_takes_the_interface_that_nccl_is_given(
    said: str, gloo: str | None, tmp_path: Path
) -> None:
    (tmp_path / "lo").mkdir()
    environ = {"NCCL_SOCKET_IFNAME": said}
    set_environment(environ, sends_messages=True, deterministic=False, interfaces=tmp_path)
    assert environ.get("GLOO_SOCKET_IFNAME") == gloo
    environ["GLOO_SOCKET_IFNAME"] = "own"
    set_environment(environ, sends_messages=True, deterministic=False, interfaces=tmp_path)
    assert environ["GLOO_SOCKET_IFNAME"] == "own"


def test_a_mesh_sets_them_and_tells_which_come_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {"CUDA_MODULE_LOADING": "LAZY"}
    monkeypatch.setattr(mesh.os, "environ", environ)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match="CUDA was initialized before") as told:
        mesh._set_environment(sends_messages=True)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32 PYTORCH_ALLOC_CONF=" in str(told[0].message)
    assert "KINETO" not in str(told[0].message)
    assert environ["CUDA_MODULE_LOADING"] == "LAZY"
    mesh._set_environment(sends_messages=True)  # nothing is new, so there is no warning


def test_a_mesh_in_time_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    monkeypatch.setattr(mesh.os, "environ", environ)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    mesh._set_environment(sends_messages=True)
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    mesh._set_environment(sends_messages=False)
    with pytest.raises(LaunchError, match="expected 32"):
        mesh._set_environment(sends_messages=True)
