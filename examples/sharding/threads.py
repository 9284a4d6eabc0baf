"""Simulated devices as threads: each runs the same code on its own shard of a model."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

T = TypeVar("T")


class Devices:
    """A number of threads that can sum tensors over all of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = Barrier(count)
        self._slots: list[Tensor] = [torch.empty(0)] * count

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Run `work` on each device; return the results. Raises the first error of a device."""
        results: list[Any] = [None] * self.count
        errors: list[Exception] = []

        def one(device: int) -> None:
            try:
                results[device] = work(device)
            except BrokenBarrierError:
                pass  # another device has failed
            except Exception as error:
                errors.append(error)
                self._barrier.abort()

        threads = [Thread(target=one, args=(device,)) for device in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            self._barrier.reset()
            raise errors[0]
        return results

    def all_reduce(self, device: int, value: Tensor) -> Tensor:
        """Return the sum over the devices. Collective: every device calls it."""
        self._slots[device] = value
        self._barrier.wait()
        total = torch.stack(self._slots).sum(0)
        self._barrier.wait()
        return total


class SumForward(Function):
    """Sum over the devices in the forward, and hand the gradient on: for partial outputs."""

    @staticmethod
    def forward(ctx: Any, devices: Devices, device: int, x: Tensor) -> Tensor:
        return devices.all_reduce(device, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, grads[0]


class SumBackward(Function):
    """Hand the input on, and sum its gradient over the devices: for broadcast inputs."""

    @staticmethod
    def forward(ctx: Any, devices: Devices, device: int, x: Tensor) -> Tensor:
        ctx.at = devices, device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        devices, device = ctx.at
        return None, None, devices.all_reduce(device, grads[0])
