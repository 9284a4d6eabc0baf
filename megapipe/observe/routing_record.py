"""The record of a step's routing in MoE layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class RoutingRecord:
    """Routing figures of a step: averages over the MoE layers unless a field says otherwise."""

    aux_loss: float
    """The auxiliary loss without its coefficient; 1 if tokens are spread evenly over experts."""
    z_loss: float
    """The z-loss without its coefficient: the mean squared logsumexp of the router's logits."""
    dropped_fraction: float
    """Fraction of the routers' choices that were dropped."""
    max_load: float
    """Load of the most chosen expert relative to the mean load of its layer; the largest such ratio
    of all layers. Dropped choices count."""
    idle_experts: int
    """Number of experts, over all layers, that no token has chosen."""
    max_bias: float | None = None
    """Largest absolute router bias after the step; None without biases."""
    max_load_by_layer: Mapping[int, float] = field(default_factory=dict)
    """Load of the most chosen expert of each layer, relative to the mean load; `max_load` is the
    largest of these ratios."""
    counts: Mapping[int, Sequence[int]] | None = None
    """Number of choices of each expert of each layer, dropped ones included; only in the steps that
    ``log.expert_counts_every`` selects."""

    def numbers(self) -> dict[str, float | None]:
        """Return the figures that cover all layers, by name, without the per-layer figures."""
        fields = asdict(self).items()
        return {
            name: value for name, value in fields if name not in ("max_load_by_layer", "counts")
        }

    def named(self) -> dict[str, float | None]:
        """Return the figures of :meth:`numbers` under their names in trackers."""
        return {f"experts/{name}": value for name, value in self.numbers().items()}
