"""Queries and keys are rotated where they lie, to the bit as by the plain formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeConfig
from megapipe.context.positions import Positions
from megapipe.model.gpt.rotary import rotary_tables
from megapipe.ops.rotary import torch_rotate


def plain(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Return the rotation as a new tensor. addcmul may leave the product that it adds unrounded."""
    (x1, x2), (cos1, cos2), (sin1, sin2) = (t.chunk(2, dim=-1) for t in (x, cos, sin))
    first = torch.addcmul(x1 * cos1, x2, sin1, value=-sign)
    return torch.cat((first, torch.addcmul(x2 * cos2, x1, sin2, value=sign)), dim=-1)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_in_place_it_is_the_plain_rotation(dtype: torch.dtype, share: float, sign: int) -> None:
    """Queries and keys lie beside values, and a `share` of each head is rotated."""
    rope = RopeConfig(percent=share)
    model = ModelConfig(hidden=96, heads=4, positions="rotary", rope=rope)
    resolved = model.resolved(vocab_size=8, sequence_length=9)
    cos, sin = rotary_tables(resolved, Positions.whole(9), torch.device("cpu"), dtype)
    width = resolved.rotary_width
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(9, 2, 2, 4, 24, dtype=dtype, generator=generator)
    x, before = qkv[..., :-1, :width], qkv.clone()
    found = torch_rotate(x, cos, sin, sign)
    assert (found.data_ptr(), found.stride()) == (x.data_ptr(), x.stride())
    wanted = before.clone()
    wanted[..., :-1, :width] = plain(before[..., :-1, :width], cos, sin, sign)
    assert not wanted.equal(before)
    assert qkv.equal(wanted), "what is not rotated stays"
