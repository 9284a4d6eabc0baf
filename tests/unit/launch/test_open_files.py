"""The limit of open files is raised where a job needs it, and a limit too low is said."""

from __future__ import annotations

import resource

import pytest

from megapipe.errors import LaunchError
from megapipe.launch.open_files import LEAST, MOST, USUAL, allow_connections, leave_room


@pytest.mark.parametrize(
    ("soft", "hard", "peers", "set_to"),
    [
        (1024, 4096, 100, None),
        (1024, 4096, 1024, (1024 + USUAL, 4096)),
        (256, -1, 100_000, (100_000 + USUAL, -1)),
        (-1, -1, 100_000, None),
        (100, 1024 + LEAST, 1024, (1024 + LEAST, 1024 + LEAST)),
        (100, 100, 3, None),
    ],
)
def test_it_is_raised_as_far_as_need_be(
    soft: int, hard: int, peers: int, set_to: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = [None]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    allow_connections(peers)
    assert asked[-1] == set_to


def test_a_system_that_refuses_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, -1))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    allow_connections(4)


def test_one_too_low_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(LaunchError, match=r"hard limit is 1024, and 1024 .*: expected ulimit -Hn"):
        allow_connections(1024)


@pytest.mark.parametrize(
    ("soft", "hard", "handle", "set_to"),
    [
        (1024, 524288, 255, None),
        (1024, 524288, 256, (524288, 524288)),
        (256, -1, 100, None),
        (256, -1, 192, (MOST, -1)),
        (4096, 4096, 4000, None),
        (-1, -1, 4000, None),
    ],
)
def test_many_files_of_data_leave_room_for_others(
    soft: int, hard: int, handle: int, set_to: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = [None]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    leave_room(handle)
    assert asked[-1] == set_to
