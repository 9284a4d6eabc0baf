"""One SLURM for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.slurm import Cluster, why_not


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    try:
        cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    except OSError as error:
        pytest.skip(str(error))
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.end()
