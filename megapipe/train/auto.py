"""``pipeline.schedule: auto``: measure the costs of operations, then search for a fast schedule.

The first step warms up, the next few are timed, and as many are recorded. Rank 0 then searches for
the order of operations that is fastest for the median costs, with the run's placement, and sends it
to all ranks. All ranks use it from the next step on, and again warm up and time a few steps. The
new schedule is written into the run folder, where a resumed run finds it.
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
from megapipe.util.no_symlinks import write_no_symlinks

WARM_UP = 1
"""Number of steps before the first timed one, at the start and after the switch."""
MEASURED = 3
"""Number of steps in each phase: timed, recorded, and timed after a switch."""
WORTH = 0.01
"""Smallest gain, as a fraction of the step time, for which a schedule is used or mentioned."""
QUICK = 300
"""Number of orders that a search simulates for each placement other than the run's."""
FILE = "schedule.csv"


class AutoSchedule:
    """Measures steps, then searches for a schedule and switches to it.

    Call :meth:`after` when a step has ended, on every rank; :attr:`recording` says whether to
    record the next step. `note` prints a line on rank 0. With `resumed`, the schedule in the run
    folder is used.
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
        self.limit = config.pipeline.activation_limit or self._most_alive(step.schedule)
        self.steps = 0
        self.recorded = 0
        """Number of steps recorded so far."""
        self.records: list[Record] = []
        self.last_step: list[Record] = []
        self.seconds: list[float] = []
        self.before: float | None = None
        """Seconds per step before the switch, kept until the gain is reported; else None."""
        self.searching = not (resumed and self._take_up())

    @property
    def recording(self) -> bool:
        """Whether the next step is to be recorded."""
        return self.searching and len(self.seconds) == MEASURED

    def _take_up(self) -> bool:
        """Use the schedule that an earlier start has found; return whether there is one."""
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
        self.note(f"schedule auto: found before, read from {self.path}")
        return True

    def _saved(self) -> str:
        """Return the text of the run folder's schedule, "" if none; raise if it cannot be used."""
        if not self.path.exists():
            return ""
        text = self.path.read_text(encoding="utf-8")
        schedule, ours = from_csv(text, name="auto"), self.train_step.schedule
        validate(schedule)
        same = ("placement", "microbatches", "direction", "slices", "sizes", "recompute")
        for what in same:
            if getattr(schedule, what) != getattr(ours, what):
                raise ScheduleError(f"its {what} differs from this run's")
        held = self._most_alive(schedule)
        if held > self.limit:
            raise ScheduleError(f"it holds {held:g} micro-batches, the limit is {self.limit:g}")
        return text

    def _most_alive(self, schedule: Schedule) -> float:
        """Return the maximum number of micro-batches whose activations a rank holds. A fraction is
        possible, as I (input gradients) frees a part of a micro-batch's activations."""
        return float(max(peak_weighted(schedule, self.layout.freed_by_input_grad)))

    def after(self, seconds: float, *, recorded: bool) -> None:
        """Process the end of a step that took `seconds`; `recorded`: the step was recorded."""
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
        """Whether the time of the step that has just ended goes into the median."""
        return (self.searching or self.before is not None) and self.steps > WARM_UP

    def _switch(self, typical: float) -> None:
        """Search for a schedule on rank 0, and switch all ranks to it if one is found."""
        text = self._search() if self.mesh.rank == 0 else ""
        text = self.mesh.share(text)
        if text:
            self.train_step.use(from_csv(text, name="auto"))
            self.before = typical

    def _search(self) -> str:
        """Return a better schedule as text; "" if no schedule is worth a switch."""
        first = self.train_step.schedule
        drawn = timeline(first, self.last_step)
        cost = replace(measured_cost(first, self.records), latency=typical_latency(drawn))
        now = float(simulate(first, cost).makespan)
        self.note(f"schedule auto: searching, for costs measured in {MEASURED} steps")
        found = self._found(first.placement, cost)
        gain = 1 - float(found.value) / now
        chosen = found.schedule if gain >= WORTH else first
        if chosen is first:
            message = f"keeping {first.name}: predicted {now:.4g} s per pass, none found is shorter"
        else:
            message = (
                f"{found.schedule.name} chosen: predicted {float(found.value):.4g} s per pass "
                f"instead of {now:.4g} s with {first.name} ({gain:.1%} less)"
            )
        self.note(f"schedule auto: {message}; at most {self.limit:g} micro-batches held per rank")
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
            activation_limit=self.limit,
            accounting="weighted",
            freed=self.layout.freed_by_input_grad,
            evaluations=evaluations,
        )

    def _advise(self, cost: Cost, now: float) -> None:
        """Print another placement that would be faster, if there is one."""
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
                f"schedule auto: {best[1]} would be faster: predicted {best[0]:.4g} s per "
                f"pass ({1 - best[0] / now:.1%} less)"
            )

    def _others(self, cost: Cost) -> Iterator[tuple[str, Placement, Cost]]:
        """Yield other placements, and the costs of their stages with an even partition."""
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
        """Spread the measured costs over the stages of another placement."""
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
        """Estimate the times of a layer, the embedding and the head from the stages' times."""
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
