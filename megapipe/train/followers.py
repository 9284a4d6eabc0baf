"""Followers: state that changes after each update by the step's routing, such as expert biases."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from megapipe.checkpoint.stateful import Stateful


class Follower(Stateful):
    """Base of state that changes after each update; derive from it and override what applies.

    Each method is collective. `routing` has the routing totals of a
    :class:`~megapipe.train.step_stats.StepStats`, equal on all ranks."""

    @property
    def empty(self) -> bool:
        """Whether no state changes after an update, so that the follower can be left out."""
        return False

    def after_update(self, step: int, routing: Sequence[float]) -> str | None:
        """Change the state after the update of a step, counted from 0; return a line to print."""
        return None

    def figures(self) -> Mapping[str, float]:
        """Return figures to add to the step's result, by name."""
        return {}

    def snapshot(self) -> None:
        """Save the state for :meth:`restore` or :meth:`confirm`, before an unvalidated update."""

    def update_speculatively(
        self, known: Iterable[tuple[Collection[int], Sequence[float]]]
    ) -> None:
        """Change the state after an update that may be undone. `known`: groups of local layers,
        each with routing totals that are complete for these layers."""

    def restore(self) -> None:
        """Undo what :meth:`update_speculatively` has changed."""

    def confirm(self, routing: Sequence[float]) -> None:
        """Replace the speculative change by the final one, from the totals of a validated step."""
