"""The limit of open files is raised where a job needs it, and a limit too low is said."""

from __future__ import annotations

import resource

import pytest

from megapipe.errors import LaunchError
from megapipe.launch.open_files import OTHERS, allow_connections


@pytest.mark.parametrize(
    ("soft", "hard", "peers", "set_to"),
    [
        (1024, 4096, 100, None),
        (1024, 4096, 1024, (4096, 4096)),
        (1024, -1, 100_000, (-1, -1)),
        (-1, -1, 100_000, None),
        (1024, 1024 + OTHERS, 1024, (1024 + OTHERS, 1024 + OTHERS)),
    ],
)
def test_it_is_raised_as_far_as_it_goes(
    soft: int, hard: int, peers: int, set_to: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = [None]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    allow_connections(peers)
    assert asked[-1] == set_to


def test_one_too_low_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(LaunchError, match=r"hard limit is 1024, and 1024 .*: expected ulimit -Hn"):
        allow_connections(1024)
