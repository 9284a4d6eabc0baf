"""Connections to a store, which are patient with a name server that does not answer."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch.distributed

from megapipe.launch.stores import open_tcp_store
from megapipe.util.timeouts import NoAnswer

LOOKUP_S, ANSWER_S = 0.6, 0.1


@pytest.mark.parametrize("is_slow", [True, False])
def test_the_store_is_given_the_time_of_look_ups(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch asks for the names of both ends, which takes ten seconds without a name server."""
    made: list[Any] = []

    def look_up(*_: object) -> tuple[str, str]:
        time.sleep(LOOKUP_S * is_slow)
        return "name", "0"

    def connect(*given: object, **_: object) -> list[Any]:
        time.sleep(LOOKUP_S + ANSWER_S / 2)
        return made

    monkeypatch.setattr(socket, "getnameinfo", look_up)
    monkeypatch.setattr(torch.distributed, "TCPStore", connect)
    if is_slow:
        assert open_tcp_store("127.0.0.1", 1, 1.0, answer_s=ANSWER_S) is made
    else:
        with pytest.raises(NoAnswer, match="another program listens there, not a rendezvous store"):
            open_tcp_store("127.0.0.1", 1, 1.0, answer_s=ANSWER_S)
