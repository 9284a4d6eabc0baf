"""Offloaded activations in host memory: when they are fetched."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megapipe.layers.offload import _Copy, _Parcel, _View

STREAM: Any = Mock(name="a stream beside the one that computes")


class FakeCopy:
    """A copy that notes when it is fetched."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes
        self.device = torch.device("cpu")
        self.fetched: torch.Tensor | None = None

    def fetch(self) -> None:
        if self.fetched is None:
            self.notes.append(self.name)
            self.fetched = torch.zeros(8, dtype=torch.uint8)

    def take(self) -> torch.UntypedStorage:
        self.fetch()
        assert self.fetched is not None
        return self.fetched.untyped_storage()


def view_of(copy: Any) -> _View:
    return _View(copy, torch.float32, 0, torch.Size([2]), (1,))


@pytest.mark.parametrize("stream", [STREAM, None])
def test_a_segment_s_copies_come_with_those_of_the_one_before(stream: Any) -> None:
    """They are in flight while its backward computes; without a stream nothing is prefetched."""
    notes: list[str] = []
    copies: Any = [FakeCopy(name, notes) for name in ("before", "first", "second", "gone")]
    before = _Parcel(None, stream)
    before.copies = [weakref.ref(copies[0])]
    parcel = _Parcel(weakref.ref(before), stream)
    parcel.copies = [weakref.ref(copy) for copy in copies[1:]]
    del copies[3]  # what it was saved for has been freed
    ahead = ["first", "second", "before"] if stream else ["second"]
    assert parcel.unpack(view_of(copies[2])).tolist() == [0.0, 0.0]
    assert notes == ahead
    parcel.unpack(view_of(copies[1]))
    before.unpack(view_of(copies[0]))
    assert notes == [*ahead, *(name for name in ("first", "before") if name not in ahead)]


def test_a_segment_before_that_is_over_has_nothing_to_fetch() -> None:
    notes: list[str] = []
    copy: Any = FakeCopy("own", notes)
    over = _Parcel(None, STREAM)
    parcel = _Parcel(weakref.ref(over), STREAM)
    del over
    parcel.copies = [weakref.ref(copy)]
    parcel.unpack(view_of(copy))
    assert notes == ["own"]


def test_a_copy_is_fetched_once() -> None:
    source = torch.arange(4.0)
    copy = _Copy(source.untyped_storage(), None)
    source.zero_()
    copy.fetch()
    fetched = copy.fetched
    copy.fetch()
    assert copy.fetched is fetched
    assert torch.empty(0).set_(_Copy(copy.take(), None).take(), 0, (4,), (1,)).tolist() == [
        0.0,
        1.0,
        2.0,
        3.0,
    ]
