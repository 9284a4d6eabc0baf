"""A rank's way to the monitor of its node."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import HashStore

from megapipe.errors import LaunchError
from megapipe.util.processes import machine
from megapipe.watch.rank import RankWatch


def test_a_rank_that_does_not_start_the_monitor_is_named(tmp_path: Path) -> None:
    store = HashStore()
    store.set(f"watch/{machine()}", "3")
    with pytest.raises(
        LaunchError, match=r"^rank 3 did not start the monitor of its node within 1 s "
    ):
        RankWatch(
            store,
            0,
            1.0,
            tmp_path,
            listen=None,
            flight_record=lambda: None,
            end=lambda verdict: None,
        )
