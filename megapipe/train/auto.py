"""``pipeline.schedule: auto``: measure what operations cost, then search a schedule for them.

The first step warms up, the next few are timed, and as many recorded. Rank 0 then searches an order
for the medians of what was recorded, on the placement that the run has, and tells it to all ranks;
they go on with it from the next step, and time it as they timed the first. The new schedule is
written into the run folder, where a resumed run finds it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from megapipe.config.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.engine.recorder import Record, measured_cost, timeline
from megapipe.errors import ScheduleError
from megapipe.layout.layout import Layout
from megapipe.model.partition import balanced, parse_layout
from megapipe.schedule.cost import Cost
from megapipe.schedule.ir import Schedule
from megapipe.schedule.memory import peak_weighted
from megapipe.schedule.placement import Placement, loop, vee, wave
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.search import SearchResult, search
from megapipe.schedule.text import from_csv, to_csv
from megapipe.schedule.timing.idle import typical_latency
from megapipe.schedule.timing.simulate import simulate
from megapipe.train.train_step import TrainStep
from megapipe.util.beneath import write_no_symlinks

WARM_UP = 1
"""Steps before the first timed one, at the start and after the switch."""
MEASURED = 3
"""Steps that are timed before and after the switch, and recorded in between."""
WORTH = 0.01
"""Least gain, as a share of the step, for which another schedule is taken or mentioned."""
QUICK = 300
"""Orders that are timed in a search on each placement other than the run's."""
FILE = "schedule.csv"


class AutoSchedule:
    """Call :meth:`after` when a step has ended, on every rank; `recording` is for the next step.

    `note` tells the user a line, on rank 0. With `resumed` the schedule of the run folder is used.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        step: TrainStep,
        mesh: ParallelMesh,
        folder: Path,
        note: Callable[[str], None],
        *,
        resumed: bool,
    ) -> None:
        self.config, self.layout, self.train_step, self.mesh = config, layout, step, mesh
        self.path = folder / FILE
        self.note = note
        self.limit = config.pipeline.memory_limit or self._most_alive(step.schedule)
        self.steps = 0
        self.recorded = 0
        """Steps recorded so far."""
        self.records: list[Record] = []
        self.last_step: list[Record] = []
        self.seconds: list[float] = []
        self.before: float | None = None
        """Seconds per step with the first schedule, once there is another."""
        self.searching = not (resumed and self._take_up())

    @property
    def recording(self) -> bool:
        """Whether the next step is to be recorded."""
        return self.searching and len(self.seconds) == MEASURED

    def _take_up(self) -> bool:
        """Go on with the schedule that an earlier start of the run has found, if it has."""
        text = ""
        if self.mesh.rank == 0:
            try:
                text = self._saved()
            except (ScheduleError, OSError, UnicodeDecodeError) as error:
                self.note(f"schedule auto: {self.path} is not used, searching again: {error}")
        text = self.mesh.share(text)
        if not text:
            return False
        self.train_step.use(from_csv(text, name="auto"))
        self.note(f"schedule auto: as found before, from {self.path}")
        return True

    def _saved(self) -> str:
        """The text of the run folder's schedule; raises if it cannot be read or used here."""
        if not self.path.exists():
            return ""
        text = self.path.read_text(encoding="utf-8")
        schedule, ours = from_csv(text, name="auto"), self.train_step.schedule
        validate(schedule)
        same = ("placement", "microbatches", "direction", "slices", "sizes", "recompute")
        for what in same:
            if getattr(schedule, what) != getattr(ours, what):
                raise ScheduleError(f"its {what} is not that of this run")
        held = self._most_alive(schedule)
        if held > self.limit:
            raise ScheduleError(f"it holds {held:g} micro-batches, the limit is {self.limit:g}")
        return text

    def _most_alive(self, schedule: Schedule) -> float:
        """The most micro-batches that a rank holds, less what their input gradients free."""
        return float(max(peak_weighted(schedule, self.layout.freed_by_input_grad)))

    def after(self, seconds: float, *, recorded: bool) -> None:
        """A step has ended, which took `seconds`, recorded or not."""
        recording = self.recording
        self.steps += 1
        if recording:
            self.last_step = self.train_step.records()
            self.records += self.last_step
            self.recorded += 1
        elif self._timing and not recorded:
            self.seconds.append(seconds)
        if self.searching and self.recorded == MEASURED:
            self.searching = False
            self._switch(statistics.median(self.seconds))
            self.seconds, self.steps = [], 0
        elif not self.searching and self.before is not None and len(self.seconds) == MEASURED:
            now = statistics.median(self.seconds)
            self.note(
                f"schedule auto: measured {now:.4g} s per step instead of {self.before:.4g} s "
                f"({1 - now / self.before:.1%} less)"
            )
            self.before = None

    @property
    def _timing(self) -> bool:
        """Whether the time of the step that has ended is to be noted."""
        return (self.searching or self.before is not None) and self.steps > WARM_UP

    def _switch(self, typical: float) -> None:
        """Search on rank 0, and go on with what it finds."""
        text = self._search() if self.mesh.rank == 0 else ""
        text = self.mesh.share(text)
        if text:
            self.train_step.use(from_csv(text, name="auto"))
            self.before = typical

    def _search(self) -> str:
        """The text of a better schedule; empty where there is none worth a change."""
        first = self.train_step.schedule
        drawn = timeline(first, self.last_step)
        cost = replace(measured_cost(first, self.records), latency=typical_latency(drawn))
        now = float(simulate(first, cost).makespan)
        self.note(f"schedule auto: searching, for costs measured in {MEASURED} steps")
        found = self._found(first.placement, cost)
        gain = 1 - float(found.value) / now
        chosen = found.schedule if gain >= WORTH else first
        if chosen is first:
            told = f"{first.name} stays: predicted {now:.4g} s per pass, none found is shorter"
        else:
            told = (
                f"{found.schedule.name} chosen: predicted {float(found.value):.4g} s per pass "
                f"instead of {now:.4g} s with {first.name} ({gain:.1%} less)"
            )
        self.note(f"schedule auto: {told}; at most {self.limit:g} micro-batches held per rank")
        self._advise(cost, float(simulate(chosen, cost).makespan))
        text = to_csv(chosen)
        try:
            staging = self.path.with_suffix(".tmp")
            write_no_symlinks(staging.parent, staging.name, text)
            staging.replace(self.path)
        except OSError as error:
            self.note(f"schedule auto: {self.path} is not written: {error.strerror}")
        return "" if chosen is first else text

    def _found(
        self, placement: Placement, cost: Cost, evaluations: int | None = None
    ) -> SearchResult:
        return search(
            placement.ranks,
            self.train_step.schedule.microbatches,
            cost_of=lambda _: cost,
            placements=(placement,),
            memory_limit=self.limit,
            accounting="weighted",
            freed=self.layout.freed_by_input_grad,
            evaluations=evaluations,
        )

    def _advise(self, cost: Cost, now: float) -> None:
        """Say which other placement would do better, if one would."""
        best: tuple[float, str] | None = None
        for name, placement, other_cost in self._others(cost):
            try:
                value = float(self._found(placement, other_cost, QUICK).value)
            except ScheduleError:
                continue
            if best is None or value < best[0]:
                best = value, name
        if best is not None and best[0] < (1 - WORTH) * now:
            self.note(
                f"schedule auto: {best[1]} would do better: predicted {best[0]:.4g} s per pass "
                f"({1 - best[0] / now:.1%} less)"
            )

    def _others(self, cost: Cost) -> Iterator[tuple[str, Placement, Cost]]:
        """Other placements, and what their stages would cost with an even partition."""
        ranks, layers, ends = (
            self.layout.pp,
            self.layout.model.layers,
            self.layout.model.has_embedding_and_head,
        )
        for name, placement in (
            ("pipeline.placement=loop pipeline.chunks=1", loop(ranks)),
            ("pipeline.placement=loop pipeline.chunks=2", loop(ranks, 2)),
            ("pipeline.placement=v", vee(ranks)),
            ("pipeline.placement=wave", wave(ranks, 2)),
        ):
            if placement != self.train_step.placement and placement.stages <= layers + 2 * ends:
                yield name, placement, self._repartitioned(cost, placement)

    def _repartitioned(self, cost: Cost, placement: Placement) -> Cost:
        """The measured costs, spread over the stages of another placement."""
        table = dict(zip("FBIW", cost.table(self.layout.stages), strict=False))
        parts = {kind: self._by_part([float(time) for time in table[kind]]) for kind in table}
        layer, embedding, head = (sum(parts[kind][i] for kind in "FIW") for i in range(3))
        layers, ends = self.layout.model.layers, self.layout.model.has_embedding_and_head
        inner = [layer] * layers
        text = balanced([embedding, *inner, head] if ends else inner, placement, ends=ends)
        specs = parse_layout(text, layers, ends=ends)

        def times(kind: str) -> tuple[float, ...]:
            layer, embedding, head = parts[kind]
            return tuple(
                len(spec.layers) * layer + spec.embedding * embedding + spec.head * head
                for spec in specs
            )

        return Cost(times("F"), times("I"), times("W"), times("B"), latency=cost.latency)

    def _by_part(self, times: list[float]) -> tuple[float, float, float]:
        """Time of a layer, of the embedding and of the head, from those of the stages."""
        specs = self.layout.stage_layers
        inner = [
            time / len(spec.layers)
            for time, spec in zip(times, specs, strict=True)
            if spec.layers and not (spec.embedding or spec.head)
        ]
        every = [t / len(spec.layers) for t, spec in zip(times, specs, strict=True) if spec.layers]
        layer = statistics.median(inner) if inner else min(every)
        first, last = (max(0.0, times[i] - len(specs[i].layers) * layer) for i in (0, -1))
        return layer, first, last
