"""Claims and tables made from records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common import Result

from ladder.ablations import SPLIT
from ladder.records import Ablation, Calibration, Missing, Record, Row, Split
from ladder.sizes import Size, size_of, words
from ladder.tables import GIB, Table

FASTER = 1.25
SPLIT_COST = 1.03


@dataclass(frozen=True)
class Report:
    """Content of the records of a run; `peak` is the dense peak in TFLOP/s, if known."""

    records: Sequence[Record]
    peak: float | None

    def results(self) -> list[Result]:
        return [*self._speeds(), *self._splits()]

    def _speeds(self) -> list[Result]:
        results = []
        for size in self._sizes():
            ours, theirs = self.best(size, "megapipe"), self.best(size, "Hugging Face")
            if ours is None:
                continue
            mfu = self._mfu(ours)
            if mfu is not None and size.goal is not None:
                peer = (
                    f"dense peak of {self.peak:g} TFLOP/s; floor {size.floor:g} %; {ours.setting}"
                )
                claim = f"model FLOPs utilisation, {size.name}"
                results.append(Result(claim, mfu, size.goal, "%", peer, at_least=True))
            if theirs is not None:
                ratio = ours.tokens_per_second / theirs.tokens_per_second
                peer = f"Hugging Face, {theirs.setting}, {theirs.state}"
                claim = f"tokens per second, {size.name}"
                results.append(Result(claim, ratio, FASTER, "x", peer, at_least=True))
        return results

    def _splits(self) -> list[Result]:
        results = []
        for record in self.records:
            if isinstance(record, Ablation) and record.change == words(SPLIT):
                claim = f"step with I and W apart, {record.size}"
                results.append(Result(claim, record.ratio, SPLIT_COST, "x", "step with B"))
            elif isinstance(record, Split):
                claim = f"I + W of {record.layers} layers, {record.size}"
                results.append(Result(claim, record.ratio, SPLIT_COST, "x", "torch autograd"))
        return results

    def tables(self) -> list[Table]:
        tables = [self._denominators(), self._calibrations(), self._steps(), self._ablations()]
        missing = [[r.what, r.why] for r in self.records if isinstance(r, Missing)]
        tables.append(Table("Not measured", ["what", "why"], missing))
        return [table for table in tables if table.rows]

    def _denominators(self) -> Table:
        headings = ["size", "L", "h", "H", "Q", "T", "V", "N", "FLOPs per token"]
        rows = []
        for size in self._sizes():
            model = size.model
            sizes = [model.layers, model.hidden, model.heads, model.head_dim, size.sequence]
            sizes += [model.vocab_size, size.matmul_parameters, size.flops]
            rows.append([size.name, *(f"{value:,}" for value in sizes)])
        peak = "not known" if self.peak is None else f"{self.peak:g} TFLOP/s"
        title = f"Denominators: 6N + 12 L H Q T per token; dense peak {peak}"
        return Table(title, headings, rows)

    def _calibrations(self) -> Table:
        found = [r for r in self.records if isinstance(r, Calibration)]
        backends = list(found[0].attention) if found else []
        headings = ["size", "matrix products TFLOP/s", "copy GB/s"]
        headings += [f"attention {name} ms" for name in backends]
        rows = [
            [
                r.size,
                f"{r.matmul_tflops:.4g}",
                f"{r.copy_gbs:.4g}",
                *("-" if ms is None else f"{ms:.3g}" for ms in r.attention.values()),
            ]
            for r in found
        ]
        tokens = {r.attention_tokens for r in found}
        title = f"Calibration; attention of {' or '.join(map(str, sorted(tokens)))} tokens"
        return Table(f"{title}, forward and backward", headings, rows)

    def _steps(self) -> Table:
        headings = ["size", "side", "setting", "types", "micro-batch", "tokens", "steps", "s/step"]
        headings += ["tokens/s", "TFLOP/s", "MFU %", "of products %", "peak GiB", "loss"]
        rates = {r.size: r.matmul_tflops for r in self.records if isinstance(r, Calibration)}
        rows = []
        for row in self.records:
            if not isinstance(row, Row):
                continue
            mfu, rate = self._mfu(row), rates.get(row.size)
            tflops = _tflops(row)
            rows.append(
                [
                    *(row.size, row.side, row.setting, row.state, str(row.rows)),
                    *(f"{row.tokens:,}", str(len(row.times)), f"{row.seconds:.4g}"),
                    *(f"{row.tokens_per_second:,.0f}", f"{tflops:.4g}"),
                    "-" if mfu is None else f"{mfu:.1f}",
                    "-" if rate is None else f"{100 * tflops / rate:.1f}",
                    "-" if row.peak is None else f"{row.peak / GIB:.1f}",
                    f"{row.loss:.3f}",
                ]
            )
        return Table("Steps: medians, each with update", headings, rows)

    def _ablations(self) -> Table:
        headings = ["size", "change", "micro-batch", "s", "s without", "ratio"]
        rows = [
            [r.size, r.change, str(r.rows), f"{r.seconds:.4g}", f"{r.base:.4g}", f"{r.ratio:.3f}"]
            for r in self.records
            if isinstance(r, Ablation)
        ]
        return Table("One change at a time", headings, rows)

    def _sizes(self) -> list[Size]:
        named = (r.size for r in self.records if isinstance(r, Calibration | Row))
        return [size_of(name) for name in dict.fromkeys(named)]

    def best(self, size: Size, side: str) -> Row | None:
        rows = [
            r for r in self.records if isinstance(r, Row) and (r.size, r.side) == (size.name, side)
        ]
        return max(rows, key=lambda row: row.tokens_per_second, default=None)

    def _mfu(self, row: Row) -> float | None:
        """Return the MFU in percent of the dense peak."""
        return None if self.peak is None else 100 * _tflops(row) / self.peak


def _tflops(row: Row) -> float:
    return row.tokens_per_second * size_of(row.size).flops / 1e12
