"""A size on either side: the largest micro-batch that fits, and the time of a step with it."""

from __future__ import annotations

from functools import partial

from ladder.bench import FEWEST_STEPS, Bench
from ladder.calibrate import calibrate
from ladder.memory import fits, release
from ladder.sides import HuggingFace, Ours, Precision
from ladder.sizes import Settings, has_key, known_changes, words

COMPILE: Settings = {"kernels": {"compile": True}}
STATES: list[Settings] = [
    {},
    {"optimizer": {"state_dtype": "bf16", "rounding": "nearest"}},
    {"optimizer": {"state_dtype": "bf16", "rounding": "nearest", "master_weights": "none"}},
]
"""Ways to keep weights and state; the first that fits is taken. They round as the peer does."""


def ours(bench: Bench) -> None:
    """Calibrate; find the largest micro-batch; time the step, then its compiled form."""
    bench.notebook.add(calibrate(bench.size, bench.device))
    release()
    compiled = bench.work.compile and has_key("kernels", "compile")
    for state in known_changes(STATES):
        rows = _uncompiled(bench, state, FEWEST_STEPS if compiled else bench.work.steps)
        if rows:
            break
    else:
        bench.missing("megapipe", "not even one sequence fits")
        return
    if compiled:
        release()
        bench.attempt(lambda: _compiled(bench, {**state, **COMPILE}, rows), "megapipe compiled")


def _uncompiled(bench: Bench, state: Settings, steps: int) -> int:
    """Search and time; return the rows of the largest micro-batch, 0 if none fits."""
    release()
    made: list[Ours] = []
    if not fits(lambda: made.append(Ours(bench.size, bench.mesh, bench.size.most, state))):
        return 0
    side = made.pop()
    rows = bench.search(side)
    if not rows or not bench.time_steps(side, "megapipe", words(state), rows, steps):
        return 0
    return side.rows


def _compiled(bench: Bench, changes: Settings, rows: int) -> None:
    side = Ours(bench.size, bench.mesh, rows, changes)
    if not bench.time_steps(side, "megapipe", words(changes), rows, bench.work.steps):
        bench.missing("megapipe compiled", "out of memory")


def peer(bench: Bench) -> None:
    """Search with the plain model; time the compiled one, or the plain one if that fails."""
    ways: list[Precision] = ["mixed", "bf16"] if bench.device.type == "cuda" else ["fp32"]
    for precision in ways:
        rows = _peer_search(bench, precision)
        compiled = partial(_peer_times, bench, precision, rows or 1, compile=True)
        plain = partial(_peer_times, bench, precision, rows, compile=False)
        # compiled it may fit where the plain model does not
        if bench.work.compile and bench.attempt(compiled, "Hugging Face compiled"):
            return
        if rows and bench.attempt(plain, "Hugging Face"):
            return
    bench.missing("Hugging Face", "not even one sequence fits")


def _peer_times(bench: Bench, precision: Precision, rows: int, *, compile: bool) -> bool:
    """Time the peer. Return whether there is a row now."""
    side = _peer_side(bench, precision, compile=compile)
    setting = "layers and loss compiled" if compile else "not compiled"
    return side is not None and bench.time_steps(
        side, "Hugging Face", setting, rows, bench.work.steps
    )


def _peer_search(bench: Bench, precision: Precision) -> int:
    side = _peer_side(bench, precision, compile=False)
    rows = bench.search(side) if side else 0
    del side
    release()
    return rows


def _peer_side(bench: Bench, precision: Precision, *, compile: bool) -> HuggingFace | None:
    """Make the peer's side; None if it does not fit."""
    made: list[HuggingFace] = []
    fits(lambda: made.append(HuggingFace(bench.size, bench.device, precision, compile=compile)))
    return made[0] if made else None
