"""Values that threads fill ahead come whole, in order, and in memory that is used again."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.layers.parameter import LocalParameter
from megapipe.optim.buffers import main_dtype
from megapipe.optim.state_store import StatePolicy, StateStore
from megapipe.optim.weight_loading import fill_parameters


def place(
    number: int, sizes: tuple[int, ...], dtype: torch.dtype, beyond: int = 0, *, home: bool = False
) -> Any:
    """Return a shard and an entry, as far as they are looked at, and memory if the place has a
    `home`; `beyond` rows are padding."""
    shape = (sizes[0] - beyond, *sizes[1:])
    spec = LocalParameter(name=f"p{number}", shape=shape, offsets=(0,) * len(sizes), sizes=sizes)
    bucket = SimpleNamespace(weights=torch.empty(0, dtype=dtype))
    memory = torch.full((spec.numel,), -2.0, dtype=main_dtype(dtype)) if home else None
    return SimpleNamespace(bucket=bucket), SimpleNamespace(spec=spec), memory


TYPES = itertools.cycle([torch.float32, torch.bfloat16, torch.float64])
PLACES = [place(n, (n % 5 + 2, n % 7 + 1), next(TYPES), n % 2) for n in range(40)]


def number(spec: LocalParameter) -> float:
    return float(spec.name[1:]) + 1


class Slow:
    """A reader that fills the true rows of a parameter with its number, after a time that differs;
    the first `together` parameters are filled at the same time, or not at all."""

    def __init__(self, together: int = 0) -> None:
        self.together = together
        self.first = threading.Barrier(max(1, together), timeout=30)
        self.lock, self.now, self.most = threading.Lock(), 0, 0
        self.threads: set[int] = set()

    def __call__(self, spec: LocalParameter, out: Tensor) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.threads.add(threading.get_ident())
        if number(spec) <= self.together:
            self.first.wait()
        rows = out[: spec.shape[0]]
        rows.fill_(-1.0)
        time.sleep((number(spec) * 7 % 5) / 2000)
        rows.fill_(number(spec))
        with self.lock:
            self.now -= 1


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_each_has_its_own_values_until_the_next_are_asked_for(threads: int) -> None:
    fill, seen, memory = Slow(threads), [], set()
    for (shard, entry, values), given in zip(
        fill_parameters(PLACES, fill, threads), PLACES, strict=True
    ):
        assert (shard, entry, None) == given
        time.sleep(0.002)  # others are filled meanwhile
        spec = entry.spec
        assert values.shape == spec.sizes
        wanted = torch.zeros(spec.sizes, dtype=values.dtype)
        wanted[: spec.shape[0]] = number(spec)
        assert torch.equal(values, wanted)
        narrow = shard.bucket.weights.dtype == torch.bfloat16
        assert values.dtype == (torch.float32 if narrow else shard.bucket.weights.dtype)
        memory.add(values.data_ptr())
        seen.append(spec.name)
    assert seen == [entry.spec.name for _, entry, _ in PLACES]
    assert len(memory) == threads + 1
    assert fill.most == max(1, threads)
    assert (threading.get_ident() in fill.threads) == (threads == 0)


@pytest.mark.parametrize("threads", [0, 3])
def test_values_are_written_to_where_they_stay(threads: int) -> None:
    """Every third place has memory of its own, which the others do not touch."""
    places = [place(n, (n % 5 + 2, 3), torch.float32, n % 2, home=n % 3 == 0) for n in range(40)]
    for (_, _, values), (_, entry, home) in zip(
        fill_parameters(places, Slow(), threads), places, strict=True
    ):
        assert values.shape == entry.spec.sizes
        assert home is None or values.data_ptr() == home.data_ptr()
    for _, entry, home in places[::3]:
        wanted = torch.zeros(entry.spec.sizes)
        wanted[: entry.spec.shape[0]] = number(entry.spec)
        assert torch.equal(home.view(entry.spec.sizes), wanted)


@pytest.mark.parametrize("threads", [0, 3])
def test_an_error_comes_in_its_turn_and_ends_the_threads(threads: int) -> None:
    before = threading.active_count()

    def fill(spec: LocalParameter, out: Tensor) -> None:
        if number(spec) in (11, 12):
            raise ValueError(spec.name)
        Slow()(spec, out)

    seen: list[str] = []
    with pytest.raises(ValueError, match="p10"):
        seen.extend(entry.spec.name for _, entry, _ in fill_parameters(PLACES, fill, threads))
    assert seen == [f"p{n}" for n in range(10)]
    assert threading.active_count() == before
    some = fill_parameters(PLACES, Slow(), threads)
    next(some)
    some.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [0, 2])
def test_what_needs_gradients_may_be_copied(threads: int) -> None:
    source = torch.ones(8, 8, requires_grad=True)

    def fill(spec: LocalParameter, out: Tensor) -> None:
        out.copy_(source[: out.shape[0], : out.shape[1]])

    with torch.no_grad():
        for _, _, values in fill_parameters(PLACES, fill, threads):
            assert not values.requires_grad
            assert values.numpy().all()


def test_nothing_to_fill() -> None:
    assert list(fill_parameters([], Slow(), 2)) == []


@pytest.mark.parametrize(
    ("policy", "dtype", "masters", "states"),
    [
        (StatePolicy(), torch.float32, True, True),
        (StatePolicy(), torch.float64, True, True),
        (StatePolicy(), torch.bfloat16, False, True),
        (StatePolicy(master="none"), torch.bfloat16, False, True),
        (StatePolicy(state_dtype="bf16"), torch.float32, True, False),
        (StatePolicy(separate_masters=True), torch.float32, False, True),
        (StatePolicy(place="host"), torch.float32, True, False),
    ],
)
def test_what_can_be_filled_in_place(
    policy: StatePolicy, dtype: torch.dtype, masters: bool, states: bool
) -> None:
    """Masters that are the weights, and states in their type where updates read them."""
    store = StateStore(torch.zeros(30, dtype=dtype), ["exp_avg"], policy)
    for name, is_so in (("model", masters), ("exp_avg", states)):
        memory = store.in_place(name, 10, 20)
        assert (memory is not None) == is_so, name
        if memory is not None:
            memory.fill_(3.0)
            store.write(name, 10, 20, memory)
            assert store.read(name, 9, 21).tolist() == [0.0, *[3.0] * 10, 0.0]
    assert (store.weights[10:20] == 3).all() == masters
