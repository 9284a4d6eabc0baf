"""Blends against the rule as a plain loop, and against megatron-core's by stored digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megapipe.data.indices.blend as module
from megapipe.data.indices import BlendSizes, blend_index, open_blend
from megapipe.errors import ConfigError, DataError


def furthest_behind(shares: Sequence[float], size: int) -> list[list[int]]:
    """Take each sample from the source furthest behind; return the sources, and numbers in them."""
    taken = [0] * len(shares)
    sources, numbers = [], []
    for sample in range(size):
        behind = [
            share * max(sample, 1.0) - count for share, count in zip(shares, taken, strict=True)
        ]
        source = behind.index(max(behind))
        sources.append(source)
        numbers.append(taken[source])
        taken[source] += 1
    return [sources, numbers]


@pytest.mark.parametrize("lanes", [1, 3, 4096])
def test_lanes_are_one_loop(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(lanes)
    monkeypatch.setattr(module, "_LANES", lanes)
    monkeypatch.setattr(module, "_COLUMNS", 7)
    for number in range(40):
        monkeypatch.setattr(module, "_SHORTEST", int(random.choice([1, 2, 50])))
        sources = int(random.integers(1, 9))
        weights = (
            random.random(sources) + 1e-6,
            np.ones(sources),
            10.0 ** -random.integers(0, 6, sources),
        )[number % 3]
        shares = (weights / weights.sum()).tolist()
        size = int(random.integers(0, 400))
        index = blend_index(shares, size)
        assert [part.dtype for part in index] == [np.int16, np.int64]
        assert [part.tolist() for part in index] == furthest_behind(shares, size)


def test_wrong_guesses_are_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [0.6, 0.3, 0.07, 0.03]
    expected = blend_index(shares, 3000)

    def guess(self: Any, first: np.ndarray) -> np.ndarray:
        return np.array([[0.0], [0.0], [0.0], [1.0]]) * first

    monkeypatch.setattr(module._Lanes, "guess", guess)
    for ours, right in zip(blend_index(shares, 3000), expected, strict=True):
        assert np.array_equal(ours, right)


def digest(parts: Sequence[np.ndarray]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{part.dtype.str}{part.shape!r}".encode() + part.tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize(
    ("weights", "size", "expected"),
    [
        ([0.3, 0.7], 1000, "762c564a04c80424"),
        ([5.0, 1.0, 1.0], 3000, "276e8fe159f04ad3"),
        ([3.0, 1.0, 0.5, 9.0, 2.0, 0.1, 1.7], 5000, "5670975eafbe9c07"),
        ([1.0] * 4, 600, "a0d2be7eaa64af85"),
    ],
)
def test_megatron_cores_blends(weights: list[float], size: int, expected: str) -> None:
    """Digests of what build_blending_indices of megatron-core 0.16.1 fills for these shares."""
    assert digest(blend_index(BlendSizes.weighted(weights, 1).shares, size)) == expected


def test_sizes() -> None:
    plan = BlendSizes.weighted([3.0, 7.0], 1001)
    assert (plan.shares, plan.size) == ([0.3, 0.7], 301 + 701)
    assert plan.requests == [303, 705], "301 and 701 with 0.5 % to spare, rounded up"
    assert BlendSizes.weighted([1.0, 1.0], 10, surplus=0.0).requests == [5, 5]
    plan = BlendSizes.by_size([30, 10], 100)
    assert (plan.shares, plan.size, plan.requests) == ([0.75, 0.25], 40, [30, 10])


def test_wrong_weights() -> None:
    for wrong in ([], [1.0, 0.0], [1.0, -1.0], [float("nan"), 1.0], [float("inf")]):
        with pytest.raises(ConfigError, match=r"data.mixture: weights \[.*expected positive"):
            BlendSizes.weighted(wrong, 10)
    with pytest.raises(ConfigError, match="expected positive numbers"):
        blend_index([1.0, 0.0], 10)
    with pytest.raises(ConfigError, match="of 0 sources"):
        blend_index([], 10)
    with pytest.raises(ConfigError, match="of 40000 sources"):
        blend_index(np.full(40000, 1 / 40000), 10)


def test_they_are_made_once(tmp_path: Path) -> None:
    plan = BlendSizes.weighted([0.3, 0.7], 50)
    for _ in range(2):
        for opened, computed in (
            (open_blend(plan, tmp_path), blend_index(plan.shares, plan.size)),
            (open_blend(BlendSizes.weighted([1.0], 0), tmp_path), blend_index([1.0], 0)),
        ):
            for part, expected in zip(opened, computed, strict=True):
                assert part.dtype == expected.dtype
                assert part[:].tolist() == expected.tolist()
        assert len(list(tmp_path.iterdir())) == 2
    for path in tmp_path.glob("*/dataset_index.npy"):
        path.write_bytes(path.read_bytes()[:-1] or b"x")
    with pytest.raises(DataError, match=r"dataset_index\.npy is damaged: remove "):
        open_blend(plan, tmp_path)
