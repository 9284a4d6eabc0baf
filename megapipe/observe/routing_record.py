"""The record of the layers with experts in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class RoutingRecord:
    """Layers with experts in a step, on average over them unless it says otherwise."""

    balance: float
    """The balance term without its coefficient: 1 where tokens are spread evenly."""
    z: float
    """The z term without its coefficient: the mean squared logsumexp of the router's logits."""
    dropped: float
    """Share of the choices that were dropped."""
    largest_load: float
    """Choices of the expert with most of them by the mean of its layer's experts, of all layers the
    largest; dropped ones are counted."""
    idle_experts: int
    """Experts of all layers that no token has chosen."""
    largest_bias: float | None = None
    """The largest size of a bias after the step; None where there are none."""
    loads: Mapping[int, float] = field(default_factory=dict)
    """By layer the choices of the expert with most of them by the mean; the largest of these is
    `largest_load`."""
    counts: Mapping[int, Sequence[int]] | None = None
    """By layer the choices of each expert, dropped ones too, in the steps of
    ``log.experts_every``."""

    def numbers(self) -> dict[str, float | None]:
        """Those of all layers together, by name."""
        fields = asdict(self).items()
        return {name: value for name, value in fields if name not in ("loads", "counts")}

    def named(self) -> dict[str, float | None]:
        """Return :meth:`numbers` under the names that trackers show."""
        return {f"experts/{name}": value for name, value in self.numbers().items()}
