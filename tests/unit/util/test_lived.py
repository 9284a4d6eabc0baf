"""Waits of a process that is suspended in between."""

from __future__ import annotations

import datetime
import time

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from megapipe.util import lived
from megapipe.util.lived import LivedTime, await_keys


class Clock:
    """Time of the system, in the place of the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lived, "time", clock)
    return clock


class Store:
    """A store whose waits take their time and, the first time, `suspended` seconds more; the keys
    come after `comes_after` waits."""

    def __init__(self, clock: Clock, suspended: float, comes_after: float) -> None:
        self.clock, self.suspended, self.comes_after = clock, suspended, comes_after
        self.waits = 0

    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None:
        self.waits += 1
        assert timeout >= datetime.timedelta(milliseconds=1), "which would be for ever"
        if self.waits > self.comes_after:
            return
        self.clock.now += timeout.total_seconds() + self.suspended
        self.suspended = 0.0
        raise DistStoreError("wait timeout after 500ms")

    def check(self, keys: list[str], /) -> bool:
        return False


def test_a_time_away_counts_for_a_second(clock: Clock) -> None:
    time_of = LivedTime()
    clock.now += 0.25
    assert time_of.look() == 0.25
    clock.now += 3600.0
    assert time_of.look() == 1.25
    assert LivedTime(5.0).look() == 0.0


def test_keys_are_awaited_for_as_long_as_the_process_runs(clock: Clock) -> None:
    await_keys(Store(clock, 3600.0, comes_after=9), ["a"], 6.0)
    store = Store(clock, 3600.0, comes_after=float("inf"))
    with pytest.raises(DistStoreError, match=r"^no a, b in the store after 6 s$"):
        await_keys(store, ["a", "b"], 6.0)
    assert store.waits == 11, "one less than without the time away"


def test_the_last_wait_is_no_endless_one(clock: Clock) -> None:
    with pytest.raises(DistStoreError):
        await_keys(Store(clock, 0.0, comes_after=float("inf")), ["a"], 1.0004)


def test_a_store_that_is_lost_is_not_waited_for(clock: Clock) -> None:
    store = Store(clock, 0.0, comes_after=0)

    def lost(*_: object) -> None:
        raise DistNetworkError("Connection reset by peer")

    store.wait = store.check = lost  # type: ignore[method-assign, assignment]
    with pytest.raises(DistNetworkError):
        await_keys(store, ["a"], 6.0)


def test_real_time_counts() -> None:
    clock = LivedTime()
    time.sleep(0.05)
    assert 0.05 <= clock.look() < 1.01
