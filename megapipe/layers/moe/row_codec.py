"""Row codecs: dispatched and combined rows take fewer bytes on the wire, and arrive rounded.

This is the compression of ScheMoE (Shi et al., EuroSys 2024). Each row is encoded by itself when it
is sent, and decoded when it has arrived. So the result does not depend on other rows, on the
dispatcher, or on whether the target is another rank. Gradients of rows are encoded in the same way,
as if encoding did not round.

bf16
    Each value x is rounded to the nearest bfloat16 value, which differs by at most 2^-8 |x|.
int8
    Values are multiples, -127 to 127, of a step that is sent with the row in fp32: M / 127, where M
    is the row's largest magnitude. The nearest multiple is at most half a step away, M / 254;
    rounding of quotients and products in fp32 adds less than 2^-13 of this. A step is at least
    2^-126, so values up to 2^-127 may become 0.

If the model's type is narrower, values are rounded to it in addition. If one value of a row is not
finite, no value of the row is finite after int8, so the anomaly is still detected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from megapipe.layers.moe.specs import Codec

LARGEST = 127
"""Largest multiple of the step in int8."""
SCALE_BYTES = 4
"""Bytes of a row's step."""


class RowCodec(Protocol):
    """Format of rows [rows, h] on the wire."""

    def encode(self, rows: Tensor) -> Tensor:
        """Encode rows [rows, h] as [rows, width], of any type."""

    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode received rows to [rows, h] of type `dtype`."""


class PlainCodec:
    """Codec that leaves rows unchanged."""

    def encode(self, rows: Tensor) -> Tensor:
        return rows

    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        return coded


class BF16Codec:
    """Codec that rounds rows to bfloat16."""

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16)

    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        return coded.to(dtype)


class Int8Codec:
    """Codec with int8 values and one fp32 step per row: [rows, h + 4] bytes, the step last."""

    def encode(self, rows: Tensor) -> Tensor:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        least = torch.finfo(torch.float32).tiny
        step = (wide.abs().amax(-1, keepdim=True) / LARGEST).float().clamp(min=least)
        steps = (wide / step).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        return torch.cat((steps, step.view(torch.int8)), -1)

    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        width = coded.shape[-1] - SCALE_BYTES
        step = coded[:, width:].contiguous().view(torch.float32)
        return (coded[:, :width].to(torch.promote_types(dtype, torch.float32)) * step).to(dtype)


UNCODED = PlainCodec()
CODECS: Mapping[Codec, RowCodec] = {"none": UNCODED, "bf16": BF16Codec(), "int8": Int8Codec()}
