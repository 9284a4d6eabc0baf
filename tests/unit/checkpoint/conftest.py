"""A store of objects, and a run's folder in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megapipe.checkpoint.storage import StorageLocation, location_of
from megapipe.util import retries
from tests.parity import object_files
from tests.parity.object_server import ObjectServer, serving


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """Yield a server; clients retry failed requests without sleeping, six times in nominal 20 s."""
    object_files.register()
    monkeypatch.setattr(retries, "sleep", lambda seconds: None)
    with serving() as server:
        yield server


@pytest.fixture
def root(store: ObjectServer) -> StorageLocation:
    """Return the folder of a run's checkpoints."""
    return location_of(store.url("run"), what="URL", patience_s=20)
