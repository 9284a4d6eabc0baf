"""A run's newest checkpoint holds finite values that no step can follow: an older one is taken."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.parity.edited_checkpoints import set_a_weight
from tests.parity.jobs import Outcome, arguments, tiny
from tests.parity.launches import run_forked

pytestmark = pytest.mark.full

CHECKPOINTS = Path("runs/run/checkpoints")


def train(folder: Path, **given: str) -> Outcome:
    """Train with two ranks, which save each step."""
    settings = {**tiny(folder), "parallel.pp": "2", "run.name": "run", "checkpoint.every": "1"}
    settings |= {"checkpoint.keep": "9", "train.steps": "5", **given}
    return run_forked(folder, 2, *arguments(settings))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stop a run after three of five steps, and let no step follow its newest checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    assert train(folder, **{"train.stop_after": "3"}).codes == [0, 0]
    set_a_weight(folder / CHECKPOINTS / "step-00000003", 3e38)
    return folder


def test_the_next_start_passes_over_it(stopped: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stopped, tmp_path / "here"))
    outcome = train(folder)
    newest = CHECKPOINTS / "step-00000003"
    outcome.assert_one_line(6, "step 4: ", "not finite", "it is the first one after ", str(newest))
    assert (folder / CHECKPOINTS / ".failed-step-00000003").exists()
    outcome = train(folder)
    assert outcome.codes == [0, 0], outcome.text
    assert f"{CHECKPOINTS}/step-00000002 at step 2 of 5" in outcome.text


def test_a_run_that_goes_back_takes_an_older_one(stopped: Path, tmp_path: Path) -> None:
    """Once it has tried other samples."""
    folder = Path(shutil.copytree(stopped, tmp_path / "here"))
    outcome = train(folder, **{"health.non_finite": "rewind", "health.max_rewinds": "2"})
    assert outcome.codes == [0, 0], outcome.text
    back = [line for line in outcome.text.splitlines() if "rewound from step 4 to step " in line]
    assert [line.partition(" to step ")[2][0] for line in back] == ["3", "3", "2"]
    assert "step-00000003 is skipped from now on" in outcome.text
    assert (folder / CHECKPOINTS / "step-00000005").exists()


RUINS = """
def rate(step, steps):
    return 1e30 if step == 3 else 1e-3
"""
NAMES = ["step-00000003", "step-00000003.1", "step-00000003.2"]


def test_a_run_that_comes_to_the_same_end_from_older_checkpoints_ends(tmp_path: Path) -> None:
    """The third update is finite, and leaves weights that no step can follow."""
    (tmp_path / "ruins.py").write_text(RUINS)
    rewind = {"health.non_finite": "rewind", "health.max_rewinds": "2", "checkpoint.keep": "2"}
    rewind |= {"optimizer.max_grad_norm": "null", "run.resume_changes": "allow"}
    ruins = {**rewind, "optimizer.schedule": "ruins:rate", "optimizer.warmup_steps": "null"}
    outcome = train(tmp_path, **ruins)
    outcome.assert_one_line(6, "step 4: ", f"no finite step follows {', '.join(NAMES)}, and")
    back = [line for line in outcome.text.splitlines() if "rewound from step 4 to step " in line]
    assert [line.partition(" to step ")[2][0] for line in back] == ["3", "3", "2", "1"]
    again = train(tmp_path, **ruins)
    again.assert_one_line(6, f"no finite step follows {', '.join([*NAMES, 'step-00000003.3'])}, ")
    assert "step-00000002.1 at step 2 of 5" in again.text
    assert "rewound" not in again.text
    folders = [path.name for path in (tmp_path / CHECKPOINTS).glob("step-*")]
    assert len(folders) <= 6, folders
    outcome = train(tmp_path, **rewind, **{"optimizer.schedule": "constant"})
    assert outcome.codes == [0, 0], outcome.text
    assert "step-00000002.1 at step 2 of 5" in outcome.text
    assert not list((tmp_path / CHECKPOINTS).glob(".failed-*"))


@pytest.mark.parametrize("lr", ["1e30", "1e39"])
def test_a_checkpoint_is_no_worse_for_another_learning_rate(
    lr: str, stopped: Path, tmp_path: Path
) -> None:
    """At which the second step, or the update of the first, is not finite."""
    folder = Path(shutil.copytree(stopped, tmp_path / "here"))
    shutil.rmtree(folder / CHECKPOINTS / "step-00000003")
    too_fast = {"optimizer.lr": lr, "optimizer.min_lr": lr, "run.resume_changes": "allow"}
    outcome = train(
        folder, **{"checkpoint.every": "9", "optimizer.max_grad_norm": "null", **too_fast}
    )
    assert set(outcome.codes) == {6}, outcome.text
    assert not list((folder / CHECKPOINTS).glob(".failed-*"))
