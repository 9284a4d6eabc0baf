"""The share of a micro-batch's activations that its input gradients free."""

from fractions import Fraction

from megapipe.config.config import Config
from megapipe.layout.layout import Layout
from megapipe.plan.units import Units

_PARTS = 1000


def freed_by_input_grad(config: Config, layout: Layout, units: Units | None = None) -> Fraction:
    """Measure the share that an I frees at every stage, in whole thousandths; W frees the rest.
    `units` are those of the layout, if there are some.

    0 where a stage's weight gradients wait with as much as it has saved, or more.
    """
    units = units or Units(config, layout)
    each = (units.of(stage)[0] for stage in range(layout.stages))
    return min(Fraction(_thousandths(unit.held, unit.queued), _PARTS) for unit in each)


def _thousandths(saved: int, queued: int) -> int:
    """Of what is saved from F to I, those that are free afterwards, rounded down."""
    return max(0, saved - queued) * _PARTS // saved if saved else 0
