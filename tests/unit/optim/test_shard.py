"""Whole weights, which are gathered and then sent to another rank that has the stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megapipe.distributed.collectives import done
from megapipe.optim import shard
from megapipe.optim.shard import Shard


def test_weights_are_sent_on_when_they_are_there() -> None:
    seen: list[str] = []
    link = SimpleNamespace(send_weights=lambda whole: seen.append("sent"))
    bucket = SimpleNamespace(sharded_weights=False, weights=torch.zeros(4), shard=None, index=0)
    own: Any = SimpleNamespace(
        bucket=bucket, link=link, updates=True, weights=torch.zeros(2), _gathered=done
    )
    waits = mock.Mock(side_effect=lambda: seen.append("gathered"))
    with mock.patch.object(shard, "start_all_gather", return_value=waits):
        Shard.start_gather(own)
    assert seen == [], "nobody waits yet"
    Shard.await_weights(own)
    assert seen == ["gathered", "sent"]
    Shard.await_weights(own)
    assert seen == ["gathered", "sent"], "once"
