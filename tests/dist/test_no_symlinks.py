"""Links in a run's folder that Weights & Biases keeps there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.config.config import Config, LogConfig
from megapipe.observe.observer import build_sinks
from tests.parity.outside import make_outside, untouched


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return make_outside(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def with_wandb(run: Path) -> None:
    build_sinks(Config(log=LogConfig(wandb="offline")), run, {}).close()


def test_links_of_wandb_s_own_are_replaced_and_not_followed(
    run: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps some in its folder, for which a run that goes on is not to be refused."""
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(run.parent / "home"))
    with_wandb(run)
    links = [path for path in (run / "wandb").iterdir() if path.is_symlink()]
    assert links
    for link in links:
        link.unlink()
        link.symlink_to(outside / "file")
    with_wandb(run)
    assert untouched(outside)
