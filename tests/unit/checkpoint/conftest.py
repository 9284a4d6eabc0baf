"""A store of objects, and a run's folder in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megapipe.checkpoint.storage import StorageLocation, place_of
from megapipe.util import retries
from tests.parity import object_files
from tests.parity.object_server import ObjectServer, serving


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """A server whose clients repeat at once a request that fails, six times in 20 s of waits."""
    object_files.register()
    monkeypatch.setattr(retries, "sleep", lambda seconds: None)
    with serving() as server:
        yield server


@pytest.fixture
def root(store: ObjectServer) -> StorageLocation:
    """The folder of a run's checkpoints."""
    return place_of(store.url("run"), what="URL", patience_s=20)
