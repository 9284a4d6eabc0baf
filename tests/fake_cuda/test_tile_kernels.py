"""A GPU's tile kernels, called by their rules, give the results of plain arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megapipe.ops.attention_choice import AttentionShape
from megapipe.ops.packed_tile_kernels import PackedFlash
from megapipe.ops.scores import ScoreModifiers
from megapipe.ops.tile_attention import TileKernel
from megapipe.ops.tile_candidates import check_blocks, check_packs
from megapipe.ops.tile_kernels import Cudnn, Efficient, Flash
from tests.fake_cuda.world import run_world

KERNELS: list[tuple[TileKernel, tuple[torch.dtype, ...]]] = [
    (Flash(), (torch.bfloat16, torch.float16)),
    (Cudnn(), (torch.bfloat16, torch.float16)),
    (Efficient(), (torch.float32, torch.bfloat16, torch.float16)),
]


def check_all(world: Any) -> int:
    checked = 0
    for kernel, dtypes in KERNELS:
        for dtype in dtypes:
            for groups in (1, 2, 4):
                check_blocks(AttentionShape(torch.device("cuda"), dtype, 4, groups, 16, 64), kernel)
                checked += 1
    return checked


@pytest.mark.slow
def test_each_gives_what_plain_arithmetic_gives() -> None:
    assert run_world(1, check_all) == [21]


def check_packed(world: Any) -> int:
    checked = 0
    for dtype in (torch.bfloat16, torch.float16):
        for groups in (1, 2, 4):
            given = AttentionShape(torch.device("cuda"), dtype, 4, groups, 16, 64)
            check_packs(replace(given, scores=ScoreModifiers(scale=groups / 8)), PackedFlash())
            checked += 1
    return checked


@pytest.mark.full
def test_the_one_of_many_blocks_gives_what_plain_arithmetic_gives() -> None:
    assert run_world(1, check_packed) == [6]
