"""Registers the device of type cuda with torch: the library, and the Python side of ``torch.cuda``.

Call :func:`install` in a fresh process, before anything imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fake_cuda import attention, grouped

CLOCK_HZ = 2e9
"""Clock rate of ``torch.cuda._sleep``."""


class Device:
    """The functions of the library, by purpose."""

    def __init__(self, library: Path) -> None:
        self._calls = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.spinning = 0
        """Receives that are posted and that no stream waits for."""
        self._calls.fake_cuda_report.restype = ctypes.c_char_p
        self._calls.fake_cuda_memory.restype = ctypes.c_int64
        self._calls.fake_cuda_most_memory.restype = ctypes.c_int64

    def count(self) -> int:
        return int(self._calls.fake_cuda_device_count())

    def report(self) -> dict[str, Any]:
        """Return the faults noted, and the host waits and kernels counted, since the last
        report."""
        found: dict[str, Any] = json.loads(self._calls.fake_cuda_report())
        return found

    def name_stream(self, stream: Any, name: str) -> None:
        """Set the name of a stream in reports of faults."""
        here = ctypes.c_int64(stream.stream_id)
        self._calls.fake_cuda_name_stream(stream.device_index, here, name.encode())

    def receives(self, more: int) -> None:
        """Note that `more` further receives spin on the device."""
        self.spinning += more
        self._calls.fake_cuda_receives(more)

    def forget_kernels(self) -> None:
        """Forget launched kernels: each is new again, as in a fresh process."""
        self._calls.fake_cuda_forget_kernels()

    def memory(self, index: int) -> int:
        return int(self._calls.fake_cuda_memory(index))

    def most_memory(self, index: int) -> int:
        return int(self._calls.fake_cuda_most_memory(index))

    def forget_most_memory(self, index: int) -> None:
        self._calls.fake_cuda_forget_most_memory(index)


installed: list[Device] = []
"""The device of this process, once it has one."""
kernels: list[Any] = []
"""What keeps its Python kernels registered."""


def install(library: Path) -> Device:
    """Give this process the device."""
    assert "torch" not in sys.modules, "torch is already loaded"
    device = Device(library)
    import torch

    assert not torch.backends.cuda.is_built(), "this torch has CUDA"
    cuda: Any = torch.cuda
    _install_devices(cuda, device)
    _install_streams(cuda)
    _install_memory(cuda, device)
    _install_random(cuda, device)
    kernels.extend((attention.install(), grouped.install()))
    installed.append(device)
    return device


def _index(device: Any = None) -> int:
    """Return the index of a device that is given as torch's functions take it."""
    import torch

    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else int(index)


def _install_devices(cuda: Any, device: Device) -> None:
    """Install the functions on devices: their number, their properties, the current one."""
    import torch

    def exchange(index: int) -> int:
        before = torch.accelerator.current_device_index()
        if index >= 0:
            torch.accelerator.set_device_index(index)
        return before

    def properties(index: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name="Fake CUDA",
            uuid=uuid.uuid5(uuid.NAMESPACE_OID, f"fake GPU {_physical(_index(index))}"),
            total_memory=141 << 30,
            multi_processor_count=132,
            major=9,
            minor=0,
        )

    cuda._lazy_init = lambda: None
    cuda.is_initialized = lambda: True
    cuda.is_available = lambda: device.count() > 0
    cuda.device_count = device.count
    cuda.current_device = torch.accelerator.current_device_index
    cuda.set_device = lambda to: exchange(_index(to)) and None
    cuda._exchange_device = cuda._maybe_exchange_device = exchange
    cuda.get_device_properties = properties
    cuda.get_device_name = lambda index=None: properties(index).name
    cuda.get_device_capability = lambda index=None: (9, 0)
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.nvtx.range = lambda *_, **__: contextlib.nullcontext()


def _physical(index: int) -> str:
    """Return the name by which a device was made visible."""
    import os

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(index) if visible is None else visible.split(",")[index].strip()


def _install_streams(cuda: Any) -> None:
    """Install streams and events. They are torch's own; its library calls the device's."""
    import torch

    class Stream(torch.Stream):
        """A torch stream with the arguments of ``torch.cuda.Stream``."""

        def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
            return super().__new__(cls, torch.device("cuda", _index(device)), priority=priority)

    def event(enable_timing: bool = False, blocking: bool = False, **_: Any) -> torch.Event:
        """Make an event with the arguments of ``torch.cuda.Event``; torch's methods take only its
        own class."""
        return torch.Event("cuda", enable_timing=enable_timing, blocking=blocking)

    @contextlib.contextmanager
    def stream(to: Any) -> Iterator[None]:
        """Make `to` and its device current."""
        if to is None:
            yield
            return
        device = torch.accelerator.current_device_index()
        before = torch.accelerator.current_stream(to.device_index)
        torch.accelerator.set_stream(to)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(device)

    cuda.Stream, cuda.Event, cuda.stream = Stream, event, stream
    cuda.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    cuda.set_stream = torch.accelerator.set_stream
    cuda.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    cuda._sleep = lambda cycles: time.sleep(cycles / CLOCK_HZ)


def _install_memory(cuda: Any, device: Device) -> None:
    import torch

    for name in ("memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda index=None: device.memory(_index(index)))
    for name in ("max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, lambda index=None: device.most_memory(_index(index)))
    cuda.reset_peak_memory_stats = lambda index=None: device.forget_most_memory(_index(index))
    cuda.empty_cache = lambda: None
    on_host = torch.UntypedStorage.resize_

    def resize_(self: Any, nbytes: int) -> Any:
        if self.device.type != "cuda":
            return on_host(self, nbytes)
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        torch.ops.fake_cuda.resize_storage(whole, nbytes)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]


def _install_random(cuda: Any, device: Device) -> None:
    """Install a random generator for each device."""
    import torch

    every = tuple(torch.ops.fake_cuda.generator(index) for index in range(device.count()))

    def seed_all(seed: int) -> None:
        for each in every:
            each.manual_seed(seed)

    cuda.default_generators = every
    cuda.get_rng_state = lambda index="cuda": every[_index(index)].get_state()
    cuda.set_rng_state = lambda state, index="cuda": every[_index(index)].set_state(state)
    cuda.manual_seed = lambda seed: every[_index()].manual_seed(seed) and None
    cuda.manual_seed_all = seed_all
