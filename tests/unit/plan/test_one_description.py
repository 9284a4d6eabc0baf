"""Bytes of a layer are said by the program alone: the plan runs it."""

from __future__ import annotations

import re

from tests.parity.package_files import FILES, inside

ROOMS = tuple(
    f"megapipe.{room}"
    for room in ("assembly", "context", "engine", "experts", "layers", "layout", "model", "plan")
)
BYTES = re.compile(r"\b(itemsize|element_size|nbytes|bytes_of|DTYPE_BYTES|main_bytes)\b")
LISTED = {
    # what the program sends or keeps in a form of its own
    "megapipe.context.tensors",
    "megapipe.engine.packed",
    "megapipe.engine.stage",
    "megapipe.layers.kv_cache",
    "megapipe.layers.offload",
    # messages between stages, and a user-defined model's
    "megapipe.model.interface",
    "megapipe.model.modules.measure",
    "megapipe.model.modules.stage",
    # the run itself
    "megapipe.plan.cuda_kernels",
    "megapipe.plan.run",
    "megapipe.plan.trace",
    # parameters, their gradients and states, and what replicas exchange of them
    "megapipe.layout.buckets",
    "megapipe.plan.communicators",
    "megapipe.plan.moe.placement",
    "megapipe.plan.memory",
    "megapipe.plan.moe.migration_traffic",
    "megapipe.plan.step_time",
    "megapipe.plan.report",
    "megapipe.plan.traffic",
}
"""Files that multiply sizes by bytes. This list may get shorter, not longer: what an operation of a
layer keeps or sends is found by running it (`megapipe/plan/run.py`)."""


def test_files_that_multiply_sizes_by_bytes() -> None:
    found = {
        name
        for name, path in FILES.items()
        if inside(name, ROOMS) and BYTES.search(path.read_text(encoding="utf-8"))
    }
    assert found == LISTED, "the plan measures what a layer keeps or sends, and nobody says it"
