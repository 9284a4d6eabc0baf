"""What --time-slices fits to times of slices: a stage whose times are known is found again."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.engine.recorder import Recorder
from megapipe.layers.microbatch import MicroBatch
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.layout.slice_cost import CausalFlops, SliceCost
from megapipe.model.gpt.flops import causal_flops
from megapipe.train import slice_times
from megapipe.train.slice_times import Slice, fit


def configure(*keys: str) -> tuple[Config, Layout]:
    base = ["model.layers=2", "model.hidden=16", "model.heads=2", "pipeline.schedule=seq1f1b"]
    return resolve(parse([*base, "train.microbatch=1", *keys]).config, None, 257)


def flops_of(config: Config) -> CausalFlops:
    return partial(causal_flops, config.model)


SLICES = [Slice(16 // n, 16 // n * i) for n in (1, 2, 4, 8) for i in range(n)]


@pytest.mark.parametrize(
    ("overhead", "attention"),
    [(Fraction(5, 2), Fraction(7, 4)), (Fraction(0), Fraction(3)), (Fraction(40), Fraction(0))],
)
def test_the_numbers_behind_times_are_found(overhead: Fraction, attention: Fraction) -> None:
    flops = flops_of(configure()[0])
    time = SliceCost(flops, overhead, attention)
    found = fit(flops, {own: 1e-9 * time(*own) for own in SLICES})
    assert found.overhead == pytest.approx(float(overhead), abs=1e-6)
    assert found.attention == pytest.approx(float(attention), abs=1e-6)
    assert found.error < 1e-9


def test_no_number_is_negative() -> None:
    """Times that grow faster than tokens and their scores."""
    flops = flops_of(configure()[0])
    found = fit(flops, {own: float(own.length) ** 3 for own in SLICES})
    assert found.overhead == 0
    assert found.attention >= 0
    falling = fit(flops, {own: own.length / (1 + own.before) for own in SLICES})
    assert falling.attention == 0
    assert falling.error > 0.1


def test_errors_are_relative() -> None:
    """Long slices, one of them a fifth off, decide no more than short ones, which tell the
    overhead; and the unit of time is any."""
    lengths = {1: 11.0, 2: 12.0, 3: 13.0, 500: 510.0, 1000: 1210.0}
    for unit in (1e-6, 1.0, 7.0):
        times = {Slice(n, 0): unit * taken for n, taken in lengths.items()}
        found = fit(lambda length: 8 * length, times)
        assert found.overhead == pytest.approx(10, rel=0.1)


class KnownStage:
    """A stage that takes the given time on its own clock, three of it forward and five backward,
    once more in every round; at first none."""

    split = 1

    def __init__(self, time: SliceCost) -> None:
        self.time = time
        self.now = 0.0
        self.slices: dict[int, Slice] = {}
        self.begun = 0

    def begin(self, *, train: bool) -> None:
        assert train
        assert not self.slices, "a slice without its backward"
        self.begun += 1

    def forward(self, key: tuple[int, int], x: torch.Tensor, mb: MicroBatch) -> None:
        before = sum(own.length for own in self.slices.values())
        assert (mb.start, mb.sequence_length) == (before, 64)
        self.slices[key[1]] = Slice(self.length_of(x), before)
        self._take(key[1], 3)

    def backward(self, key: tuple[int, int], grad: torch.Tensor) -> None:
        assert key[1] == len(self.slices) - 1, "the last slice first"
        assert self.length_of(grad) == self.slices[key[1]].length
        self._take(key[1], 5)
        del self.slices[key[1]]

    def length_of(self, x: torch.Tensor) -> int:
        assert x.shape[1:] == (1, 16)
        return len(x) * self.split

    def _take(self, part: int, parts: int) -> None:
        turn = (self.begun - 1) // len(slice_times.COUNTS)
        self.now += turn * parts * self.time(*self.slices[part])


@pytest.mark.parametrize("split", [1, 4])
def test_every_slice_is_timed_where_it_is(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of five rounds is that of the third; the first, which warms up, does not count."""
    keys = (f"parallel.tp={split}", f"parallel.sequence_parallel={str(split > 1).lower()}")
    config, layout = configure("train.sequence_length=64", "model.heads=4", *keys)
    stage = KnownStage(SliceCost(flops_of(config), Fraction(9, 2), Fraction(5, 4)))
    stage.split = split

    def recorder(device: torch.device) -> Recorder:
        made = Recorder(device)
        clock: Callable[[], Any] = lambda: stage.now  # noqa: E731
        made._stamp = clock
        return made

    monkeypatch.setattr(slice_times, "Recorder", recorder)
    monkeypatch.setattr(slice_times, "_stage", lambda *_: stage)
    mesh: Any = type("Mesh", (), {"device": torch.device("cpu")})
    times = slice_times.measure(config, layout, mesh)
    assert {own.length for own in times} == {64, 32, 16, 8, 4}
    assert len(times) == 31
    assert times == {own: 3 * 8 * stage.time(*own) for own in times}
    text = slice_times.report(config, layout, mesh)
    assert "slices: 31 of 4 to 64 tokens" in text
    assert "pipeline.options.slice_overhead_tokens=4.5 pipeline.slice_attention_cost=1.25\n" in text


def test_uneven_lengths_and_short_sequences() -> None:
    assert slice_times._even(22, 4, 2) == [(4, 0), (6, 4), (6, 10), (6, 16)]
    assert slice_times._even(6, 1, 1) == [(6, 0)]
