from dataclasses import replace
from typing import Any, Protocol

import pytest

from megapipe.observe import StepRecord

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
    """A plausible step, with the given fields changed."""
    return lambda **changes: replace(_RECORD, **changes)
