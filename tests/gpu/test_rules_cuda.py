"""Update rules on a CUDA device."""

from __future__ import annotations

import pytest

from megapipe.distributed.mesh import Axis
from megapipe.optim.state_store import StatePolicy
from tests.parity.optim_rules import PLAIN, assemble, error, expected, run_rule

pytestmark = pytest.mark.gpu
ALONE = Axis.alone()


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("place", ["device", "host"])
def test_a_rule_does_what_its_plain_form_does(name: str, place: str) -> None:
    policy = StatePolicy(place="host", window_bytes=1) if place == "host" else None
    found = run_rule(name, ALONE, ALONE, device="cuda", policy=policy)
    assert error(assemble([found]), expected(name)) < 1e-12
