"""An operation of the stand-in for NCCL: its results, and the inputs that it may still read.

Until somebody waits for it, its outputs hold garbage and its inputs must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.fake_cuda.device import Device
from tests.fake_cuda.ledger import Ledger

NAN = 0xFF
"""Bytes of ones are NaN in every floating-point type."""
POISON = 0x81
"""Byte that makes an integer large and negative, so that it is no index and no count."""


def on_host(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor of the device, as bytes of the host.

    Raises RuntimeError if the tensor's memory was freed.
    """
    if tensor.untyped_storage().nbytes() < tensor.nbytes:
        raise RuntimeError("NCCL uses memory that has been given back")
    view: Tensor = torch.ops.fake_cuda.host_view(tensor.detach())
    return view.view(-1).view(torch.uint8)


def spoil(tensor: Tensor) -> None:
    is_number = tensor.is_floating_point() or tensor.dtype == torch.uint8
    on_host(tensor).fill_(NAN if is_number else POISON)


class Frozen:
    """Tensors that must stay as they are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._kept = [(tensor, on_host(tensor).clone()) for tensor in tensors]

    def changed(self) -> bool:
        return any(not on_host(tensor).equal(before) for tensor, before in self._kept)


class Pending:
    """An operation in flight on a stream of its own.

    It keeps its tensors until the wait, as torch does: the allocator does not know that stream.
    """

    def __init__(
        self,
        name: str,
        inputs: Frozen,
        event: torch.Event,
        finish: Callable[[], None],
        ledger: Ledger,
    ) -> None:
        self.name = name
        self._inputs: Frozen | None = inputs
        self._event = event
        self._finish = finish
        self._ledger = ledger

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait; the host waits too, for the values."""
        if self._inputs is not None:
            inputs, self._inputs = self._inputs, None
            if inputs.changed():
                self._ledger.fault(f"{self.name}: what it was given was changed before the wait")
            self._finish()
        torch.cuda.current_stream().wait_event(self._event)
        self._finish = _nothing  # from now on the tensors may be freed
        return True

    def is_completed(self) -> bool:
        return self._inputs is None

    def __del__(self) -> None:
        if self._inputs is not None:
            self._ledger.fault(f"{self.name}: it was let go, and nobody had waited for it")


class Sending(Pending):
    """A message in flight, for which nobody has to wait: it is complete when asked the second
    time."""

    asked = 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def __del__(self) -> None:
        if self._inputs is not None and self._inputs.changed():
            self._ledger.fault(f"{self.name}: it was changed while it was on its way")


class Receiving(Pending):
    """A posted receive: a kernel spins on `device` until a stream waits for it."""

    def __init__(self, *args: Any, device: Device) -> None:
        super().__init__(*args)
        self._device = device
        device.receives(1)

    def wait(self, timeout: Any = None) -> bool:
        if self._inputs is not None:
            self._device.receives(-1)
        return super().wait(timeout)


def _nothing() -> None:
    pass
