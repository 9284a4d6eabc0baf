"""A checkpoint of any layout is loaded by any other, bit for bit, as a naive reader finds it.

The reader (`tests/parity/naive_reader.py`) shares no code with the package. It is compared with all
that the ranks hold in memory, copies included, and with what they save again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from megapipe.testing import run_world
from tests.parity.naive_reader import in_type, read_global, read_manifest
from tests.parity.rank_state import assert_held
from tests.parity.ranks import STEPS
from tests.parity.reshard import (
    FAULTS,
    LAYOUTS,
    SIZES,
    Seen,
    folder_of,
    of_size,
    reshard,
    reshard_with_faults,
    train_and_save,
)

pytestmark = pytest.mark.full

SOURCE, OTHER = "dp 3", "pp 3"
TARGET = "dp 2 tp 2 pp 2"
"""Layout that is given faults: it has shards, tied weights and padding."""


IN_CI = [name for i, name in enumerate(LAYOUTS) if i % 5 in (0, 2) or name in (SOURCE, OTHER)]
ALL = pytest.param([*LAYOUTS], marks=pytest.mark.slow, id="all")


@pytest.fixture(scope="module", params=[pytest.param(IN_CI, id="some"), ALL])
def names(request: pytest.FixtureRequest) -> list[str]:
    return list(request.param)


def those_of_size(size: int, names: Sequence[str]) -> list[str]:
    return [name for name in of_size(size) if name in names]


@pytest.fixture(scope="module")
def saved(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint of each layout, which is what its ranks held."""
    root = tmp_path_factory.mktemp("saved")
    for size in SIZES:
        mine = those_of_size(size, names)
        ranks = run_world(size, train_and_save, mine, root)
        for name in mine:
            assert_seen([rank[name] for rank in ranks], folder_of(root, name))
    return root


def assert_seen(ranks: Sequence[Seen], folder: Path) -> None:
    """Check that the ranks hold what is in this checkpoint."""
    assert_held([rank.parts for rank in ranks], read_global(folder))
    coordinates = read_manifest(folder)["coordinates"]
    for rank in ranks:
        assert (rank.updates, rank.samples) == (STEPS, coordinates["samples"])


def assert_resharded(ranks: Sequence[Seen], source: Path, again: Path) -> None:
    """Check that the ranks hold what is in `source`, and have saved it as `again`, in their
    types."""
    assert_seen(ranks, source)
    before, after = read_global(source), read_global(again)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        expected = in_type(before[name], tensor.dtype)
        assert np.array_equal(tensor.bits, expected.bits), f"{name} is saved again as another"
    coordinates = [read_manifest(folder)["coordinates"] for folder in (source, again)]
    assert coordinates[0] == coordinates[1]


def check(size: int, pairs: Mapping[str, Sequence[str]], root: Path) -> int:
    """Check all pairs with targets of `size` processes; return how many there are."""
    ranks = run_world(size, reshard, pairs, root, timeout_s=600)
    for source, target in ranks[0]:
        seen = [rank[source, target] for rank in ranks]
        again = folder_of(root, f"{source} as {target}")
        assert_resharded(seen, folder_of(root, source), again)
    return len(ranks[0])


def test_no_two_layouts_have_saved_the_same(names: list[str], saved: Path) -> None:
    """Or a load that does nothing would not be noticed."""
    tensors = {name: read_global(folder_of(saved, name)) for name in names}
    for entry in ("model/embedding.word.weight", "optimizer.exp_avg_sq/final_norm.weight"):
        values = {in_type(each[entry], "bf16").bits.tobytes() for each in tensors.values()}
        assert len(values) == len(names) >= 12


@pytest.mark.parametrize("size", SIZES)
def test_each_layout_is_loaded_by_another(size: int, names: list[str], saved: Path) -> None:
    """Each is a source and a target once: the layouts in a ring."""
    before = {name: names[(i * 7 - 7) % len(names)] for i, name in enumerate(names)}
    ring = {names[i * 7 % len(names)]: before[name] for i, name in enumerate(names)}
    assert sorted(ring) == sorted(ring.values()) == sorted(names)
    assert all(source != target for target, source in ring.items())
    pairs = {target: [ring[target]] for target in those_of_size(size, names)}
    assert check(size, pairs, saved) == len(pairs)


@pytest.mark.parametrize("names", [ALL], indirect=True)
@pytest.mark.parametrize("size", SIZES)
def test_every_layout_is_loaded_by_every_layout(size: int, saved: Path) -> None:
    targets = of_size(size)
    pairs = {target: list(LAYOUTS) for target in targets}
    assert check(size, pairs, saved) == len(targets) * len(LAYOUTS)


def test_each_fault_of_loading_and_saving_is_noticed(saved: Path) -> None:
    size = LAYOUTS[TARGET].world
    ranks = run_world(size, reshard_with_faults, SOURCE, TARGET, OTHER, saved)
    source = folder_of(saved, SOURCE)
    for fault, words in FAULTS.items():
        seen, again = [rank[fault.__name__] for rank in ranks], folder_of(saved, fault.__name__)
        with pytest.raises(AssertionError) as noticed:
            assert_resharded(seen, source, again)
        assert words in str(noticed.value), fault
