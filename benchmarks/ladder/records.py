"""Records of a worker process: one JSON object per line, each on disk as soon as known."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Calibration:
    """Best rates of the device at the shapes of a size."""

    size: str
    matmul_tflops: float
    """Rate of the matrix products of a layer and the head, forward and backward."""
    copy_gbs: float
    """GB read and written per second by a copy."""
    attention: dict[str, float | None]
    """Milliseconds of a causal forward and backward by backend; None: it cannot do this."""
    attention_tokens: int


@dataclass(frozen=True)
class Row:
    """One side at one size."""

    size: str
    side: str
    setting: str
    state: str
    """Types of weights and optimizer state."""
    rows: int
    """Sequences of a micro-batch."""
    tokens: int
    """Tokens of one step."""
    times: list[float]
    """Seconds of each step."""
    peak: int | None
    """Bytes allocated at most."""
    loss: float

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Ablation:
    """A change of one setting."""

    size: str
    change: str
    rows: int
    seconds: float
    base: float
    """Seconds without the change."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.base


@dataclass(frozen=True)
class Split:
    """I + W of some layers against autograd's backward: the ratio of times."""

    size: str
    layers: int
    ratio: float


@dataclass(frozen=True)
class Missing:
    """Something that was not measured, and why."""

    what: str
    why: str


Record = Calibration | Row | Ablation | Split | Missing
_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Calibration, Row, Ablation, Split, Missing)
}


class Notebook:
    """Appends records to a file and prints each as a line."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def add(self, record: Record) -> None:
        line = json.dumps({"kind": type(record).__name__, **asdict(record)})
        with self.file.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
        print(describe(record), flush=True)


def read(file: Path) -> list[Record]:
    """Read all records; a last line that was cut off is skipped."""
    records = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        records.append(_KINDS[values.pop("kind")](**values))
    return records


def describe(record: Record) -> str:
    """Return one line about a record, for the console."""
    if isinstance(record, Calibration):
        return (
            f"{record.size}: matrix products {record.matmul_tflops:.4g} TFLOP/s, "
            f"copies {record.copy_gbs:.4g} GB/s"
        )
    if isinstance(record, Row):
        return (
            f"{record.size}: {record.side}, {record.setting}: micro-batch {record.rows}, "
            f"{record.seconds:.4g} s per step, {record.tokens_per_second:,.0f} tokens/s"
        )
    if isinstance(record, Ablation):
        return f"{record.size}: {record.change}: {record.ratio:.3f} x the time"
    if isinstance(record, Split):
        return f"{record.size}: I + W of {record.layers} layers: {record.ratio:.3f} x autograd"
    return f"not measured: {record.what}: {record.why}"
