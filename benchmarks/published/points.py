"""Rows of a file of points: layouts whose step time or memory somebody has measured."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"
PUBLISHED, OWN = DATA / "measured_points.csv", DATA / "megapipe_points.csv"
"""Rows of papers and reports, and of docs/benchmarks.md."""


@dataclass(frozen=True)
class Point:
    """One measured layout. None: the source does not say."""

    id: str
    source: str
    model: str
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    ffn: int | None
    vocab: int | None
    sequence: int
    gpu: str
    gpus: int
    precision: str
    tp: int
    pp: int
    chunks: int | None
    cp: int
    ep: int
    dp: int
    sharding: str
    microbatch: int | None
    global_batch: int
    recompute: str
    schedule: str
    step_s: float | None
    memory: float | None
    """Bytes on the device that needs most."""
    ran: bool
    """False: it ran out of memory."""
    notes: str

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Point:
        """Read a row of a file."""

        def number(name: str) -> int | None:
            return int(float(row[name])) if row.get(name) else None

        def given(name: str, default: int = 1) -> int:
            found = number(name)
            return default if found is None else found

        notes = row.get("notes", "")
        gpus, batch, sequence = given("gpus"), given("gbs"), given("seq")
        tp, pp, cp = given("tp"), given("pp"), given("cp")
        step = float(row["step_s"]) if row.get("step_s") else None
        if step is None and row.get("tok_s_gpu"):
            step = batch * sequence / (float(row["tok_s_gpu"]) * gpus)
        memory = float(row["mem_GB"]) if row.get("mem_GB") else None
        if memory is not None:
            memory *= 2**30 if "GiB" in notes else 1e9
        return cls(
            id=row["id"],
            source=row["source"],
            model=row["model"],
            layers=number("layers"),
            hidden=number("hidden"),
            heads=number("heads"),
            kv_heads=number("kv_heads"),
            ffn=number("ffn"),
            vocab=number("vocab"),
            sequence=sequence,
            gpu=row["gpu"],
            gpus=gpus,
            precision=row["precision"].lower(),
            tp=tp,
            pp=pp,
            chunks=number("vpp"),
            cp=cp,
            ep=given("ep"),
            dp=given("dp", gpus // (tp * pp * cp)),
            sharding=row.get("shard", ""),
            microbatch=number("mbs"),
            global_batch=batch,
            recompute=row.get("recompute", ""),
            schedule=row.get("schedule", ""),
            step_s=step,
            memory=memory,
            ran=row.get("outcome", "ran") != "OOM",
            notes=notes,
        )

    @property
    def origin(self) -> str:
        """The source in a few words, as in Zero Bubble."""
        return re.split(r"[,(]|\.md| docs/| benchmarks/| best_practice/", self.source)[0].strip()

    @property
    def is_own(self) -> bool:
        """Whether megapipe itself was measured."""
        return self.source.startswith("megapipe")

    @property
    def stages(self) -> int:
        """Virtual stages of the whole pipeline."""
        return self.pp * (self.chunks or 1)

    @property
    def device(self) -> str:
        """Name of the device in the planner's table."""
        return self.gpu.split()[0].removesuffix("-80GB")


def read_points(files: Iterable[Path]) -> list[Point]:
    """Read files of points."""
    points = []
    for file in files:
        with file.open(newline="", encoding="utf-8") as lines:
            points += [Point.of(row) for row in csv.DictReader(lines)]
    return points
