"""The figures of a plan, from which its text and its JSON are made."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.layout import Layout
from megapipe.layout.speeds import Speeds
from megapipe.plan.memory_fit import MemoryDemand, StepFigures, demand, step_figures
from megapipe.plan.step_time import simulate_step
from megapipe.plan.traffic import CollectiveTraffic, step_traffic
from megapipe.plan.units import Units
from megapipe.schedule.timing.simulate import Timeline


@dataclass(frozen=True)
class PlanFigures:
    """Memory, traffic and time of a run, as planned."""

    units: Units
    speeds: Speeds
    imbalance: Fraction | None
    """Rows of the planned rank's experts relative to the mean; None: not given."""
    timeline: Timeline
    """A step, or several windows of a no-flush schedule."""
    memory: MemoryDemand
    time: StepFigures | None
    """None: the device's speed is unknown."""
    traffic: Sequence[Sequence[CollectiveTraffic]]
    """Collectives and messages in a step, for each process along the pipeline axis."""

    @property
    def wire(self) -> Mapping[str, Fraction]:
        """Bytes that the process that sends most sends in a step, by axis."""
        return most_sent(self.traffic, attrgetter("axis"))


def plan_figures(config: Config, layout: Layout, imbalance: Fraction | None = None) -> PlanFigures:
    """Plan a resolved configuration. `imbalance`: rows of the rank's experts relative to the mean,
    for the planned memory (:func:`megapipe.layout.moe.checks.check_imbalance`).

    Raises :class:`ConfigError` if the vocabulary size is not known yet or the stages do not hold
    the model's layers, and :class:`ScheduleError` if the schedule cannot be executed.
    """
    if config.model.vocab_size is None:
        raise ConfigError(
            f"model.vocab_size is not known without data.tokenizer={config.data.tokenizer}: "
            "set it for a plan"
        )
    placed = [layer for spec in layout.stage_layers for layer in spec.layers]
    if placed != list(range(layout.model.layers)):
        raise ConfigError(
            f"the stages hold layers {placed}, but the model has 0 to {layout.model.layers - 1}"
        )
    speeds = Speeds.of(config)
    units = Units(config, layout)
    timeline = simulate_step(units, speeds)
    return PlanFigures(
        units=units,
        speeds=speeds,
        imbalance=imbalance,
        timeline=timeline,
        memory=demand(units, imbalance),
        time=step_figures(units, speeds, timeline),
        traffic=[step_traffic(units, rank) for rank in range(layout.pipeline_processes)],
    )


def most_sent(
    of_ranks: Iterable[Iterable[CollectiveTraffic]], name: Callable[[CollectiveTraffic], str]
) -> dict[str, Fraction]:
    """Return the bytes of the process that sends most, for each axis or purpose. `name`: function
    that returns the axis or the purpose of some traffic."""
    most: dict[str, Fraction] = {}
    for exchanges in of_ranks:
        sent: dict[str, Fraction] = defaultdict(Fraction)
        for exchange in exchanges:
            sent[name(exchange)] += exchange.wire
        most |= {key: max(size, most.get(key, size)) for key, size in sent.items()}
    return most
