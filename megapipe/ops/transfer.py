"""From the host to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, which is in host memory, on `device`; a copy to a GPU is not waited for.

    The copy is made from pinned memory, which torch does not reuse before the copy is done.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
