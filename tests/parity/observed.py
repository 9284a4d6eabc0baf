"""Records of steps and validations, and runs that report to Weights & Biases."""

from dataclasses import replace
from typing import Any, Protocol

import pytest

from megapipe.config.config import Config, LogConfig, RunConfig
from megapipe.observe import StepRecord, ValidationRecord

_RECORD = StepRecord(
    step=7,
    steps=300,
    loss=2.34567,
    lr=3e-4,
    grad_norm=0.8125,
    seconds=0.4123,
    tokens=8192,
    tokens_per_second=19868.3,
    tflops_per_device=0.5213,
    mfu=0.4126,
    memory_gib=1.214,
    eta_seconds=121.0,
    samples=224,
)


class MakeRecord(Protocol):
    def __call__(self, **changes: Any) -> StepRecord: ...


@pytest.fixture
def make_record() -> MakeRecord:
    """Return a function that makes a plausible step record, with the given fields changed."""
    return lambda **changes: replace(_RECORD, **changes)


VALIDATION = ValidationRecord(step=7, steps=300, loss=2.5, seconds=1.0)


@pytest.fixture
def wandb_home(tmp_path, monkeypatch):
    """Use no Weights & Biases account, and no settings of this user."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(home))
    return home


def wandb_config(mode):
    return Config(run=RunConfig(name="first"), log=LogConfig(wandb=mode))
