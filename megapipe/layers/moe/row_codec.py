"""Codecs of rows: fewer bytes for those that travel to experts and back, which arrive rounded.

A codec is what compression is in ScheMoE (Shi et al., EuroSys 2024). Each row is coded by itself
when it leaves and decoded when it has arrived, so what comes out does not depend on the rows beside
it, on the way that it takes, or on whether its goal is another rank. Gradients of rows are coded
likewise, as if coding were no rounding.

bf16
    Each value x is rounded to the nearest of bfloat16 and differs from x by 2^-8 |x| at most.
int8
    Values are whole multiples, -127 to 127, of a step, which travels with the row in fp32: 1/127 of
    the largest value M of the row. The nearest multiple is half a step away at most, M / 254; that
    quotients and products are rounded in fp32 adds less than 2^-13 of this. A step is 2^-126 at
    least, so values up to 2^-127 may become 0.

To either the rounding to the type of the model comes, where that is narrower. In a row with a value
that is not finite no value arrives as a finite one of int8, so such gradients are still noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from megapipe.layers.moe.specs import Codec

LARGEST = 127
"""Steps of int8."""
SCALE_BYTES = 4
"""Of a row's step."""


class RowCodec(Protocol):
    """How rows [rows, h] look on the wire."""

    def encode(self, rows: Tensor) -> Tensor:
        """[rows, width] of any type."""

    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """[rows, h] in the type that they had."""


class PlainCodec:
    """As they are."""

    def encode(self, rows: Tensor) -> Tensor:
        return rows

    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        return coded


class BF16Codec:
    """In bfloat16."""

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16)

    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        return coded.to(dtype)


class Int8Codec:
    """In whole steps of each row's own: [rows, h + 4], int8, the last four are the step."""

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
