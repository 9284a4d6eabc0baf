"""The share of a micro-batch's activations that input gradients (I) free."""

from fractions import Fraction

from megapipe.config.config import Config
from megapipe.layout.layout import Layout
from megapipe.plan.units import Units

_PARTS = 1000


def freed_by_input_grad(config: Config, layout: Layout, units: Units | None = None) -> Fraction:
    """Return the smallest share of activations that I frees at any stage; W frees the rest.

    The share is rounded down to thousandths. It is 0 if deferred weight gradients hold as many
    bytes as F has saved. `units`: the layout's measured costs, if they exist already.
    """
    units = units or Units(config, layout)
    each = (units.of(stage)[0] for stage in range(layout.stages))
    return min(Fraction(_thousandths(unit.held, unit.queued), _PARTS) for unit in each)


def _thousandths(saved: int, queued: int) -> int:
    """Return how many thousandths of the `saved` bytes an I operation frees, rounded down; `queued`
    bytes stay until W."""
    return max(0, saved - queued) * _PARTS // saved if saved else 0
