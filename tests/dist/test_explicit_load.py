"""`checkpoint.load` of what is damaged, by two ranks.

A step's folder is refused in one line. From a run, the newest intact checkpoint is taken, and the
skipped ones are reported.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.edited_checkpoints import set_a_weight
from tests.parity.jobs import Outcome, arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full

NEWEST = Path("runs/old/checkpoints/step-00000003")
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run of two ranks with three checkpoints, all of them intact."""
    folder = tmp_path_factory.mktemp("made")
    given = {"run.name": "old", "checkpoint.every": "1", "checkpoint.keep": "9"}
    assert load(folder, **given).codes == [0, 0]
    shutil.rmtree(folder / "cache")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "here"))


def load(folder: Path, source: Path | str | None = None, **given: str) -> Outcome:
    """Train on with two ranks, in a run of another name."""
    settings = {**tiny(folder), "parallel.pp": "2", "run.name": "new", "train.steps": "3", **given}
    if source is not None:
        settings |= {"checkpoint.load": str(source), "train.steps": "4"}
    return run_forked(folder, 2, *arguments(settings))


def shards(step: Path) -> list[Path]:
    return sorted(step.glob("*.safetensors"))


def flipped(path: Path, at: float = 0.5) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1
    path.write_bytes(data)


def not_finite(step: Path) -> None:
    """Put a NaN into a weight of the second rank, with checksums as if it had been trained so."""
    set_a_weight(step, float("nan"))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a bit of the manifest": (
        lambda step: flipped(step / "manifest.json"),
        "manifest.json is damaged: its own checksum does not match",
    ),
    "a cut manifest": (
        lambda step: (step / "manifest.json").write_bytes(b'{"body":'),
        "manifest.json is damaged",
    ),
    "no manifest": (
        lambda step: (step / "manifest.json").unlink(),
        "step-00000003 is neither a checkpoint (manifest.json), nor a run folder",
    ),
    "a bit of the first rank's shard": (
        lambda step: flipped(shards(step)[0]),
        "00000-0000.safetensors is damaged: bytes ",
    ),
    "a bit of the second rank's header": (
        lambda step: flipped(shards(step)[-1], at=0.01),
        "00001-0000.safetensors is damaged: its header is not what the manifest says",
    ),
    "a cut shard": (
        lambda step: shards(step)[-1].write_bytes(shards(step)[-1].read_bytes()[:-4]),
        "00001-0000.safetensors has",
    ),
    "no shard": (
        lambda step: shards(step)[-1].unlink(),
        "00001-0000.safetensors: No such file or directory",
    ),
    "a value that is not finite": (not_finite, "has values that are not finite"),
}


@in_parts("damage", DAMAGES, full=4)
def test_a_step_that_is_asked_for_is_never_replaced(damage: str, folder: Path) -> None:
    """Though an older one and one of the same step lie beside it, intact."""
    make, words = DAMAGES[damage]
    shutil.copytree(folder / NEWEST, folder / f"{NEWEST}.1")
    make(folder / NEWEST)
    outcome = load(folder, NEWEST)
    outcome.assert_one_line(5, "checkpoint.load: ", str(NEWEST), words)
    assert len(outcome.codes) == 2
    assert not list((folder / "runs/new").rglob("step-*"))
    assert not (folder / "cache").exists(), "a corpus was prepared for nothing"


def test_a_pointer_is_no_checkpoint(folder: Path) -> None:
    load(folder, NEWEST.parent / "latest").assert_one_line(5, "checkpoint.load", "no such folder")


@pytest.mark.parametrize("damage", ["no manifest", "no shard", "a value that is not finite"])
def test_of_a_run_an_older_checkpoint_is_taken_and_that_is_told(damage: str, folder: Path) -> None:
    DAMAGES[damage][0](folder / NEWEST)
    outcome = load(folder, "runs/old")
    assert outcome.codes == [0, 0], outcome.text
    told = [line for line in outcome.text.splitlines() if "skipped a damaged" in line]
    assert len(told) == 1, outcome.text
    assert "skipped a damaged checkpoint: " in told[0]
    assert str(NEWEST) in told[0]
    assert "resumed from runs/old/checkpoints/step-00000002 at step 2 of 4" in outcome.text


@in_parts("pointer", ["step-00000009\n", "../../../elsewhere", ""], full=2)
def test_a_run_whose_pointer_leads_nowhere_has_its_newest_loaded(
    pointer: str, folder: Path
) -> None:
    (folder / NEWEST.parent / "latest").write_text(pointer)
    outcome = load(folder, "runs/old")
    assert outcome.codes == [0, 0], outcome.text
    assert f"resumed from {NEWEST} at step 3 of 4" in outcome.text
    assert "skipped a damaged" not in outcome.text


@pytest.mark.parametrize("name", ["runs/old", "latest"])
def test_a_run_without_any_intact_checkpoint_is_refused(name: str, folder: Path) -> None:
    for step in (folder / NEWEST.parent).glob("step-*"):
        flipped(shards(step)[0])
    outcome = load(folder, name, **{"run.folder": "runs"})
    outcome.assert_one_line(5, "checkpoint.load: ", "no checkpoint is intact", "step-00000001")
    assert not list((folder / "runs/new").rglob("step-*"))
