"""State that follows the updates of a step by what its totals tell of routing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from megapipe.checkpoint.stateful import Stateful


class Follower(Stateful):
    """State that follows updates; derive from it and override the parts that exist.

    All ranks call each method. `routing` is that of :class:`~megapipe.train.totals.StepStats`, the
    same on all of them.
    """

    @property
    def empty(self) -> bool:
        """Whether there is nothing to follow an update."""
        return False

    def after_update(self, step: int, routing: Sequence[float]) -> str | None:
        """Follow the update of a step, counted from 0; return a line for the user, if there is one
        to tell."""
        return None

    def figures(self) -> Mapping[str, float]:
        """Return numbers for the result of a step."""
        return {}

    def snapshot(self) -> None:
        """Keep what there is for :meth:`restore` or :meth:`confirm`, before an update that is
        validated later."""

    def update_speculatively(
        self, known: Iterable[tuple[Collection[int], Sequence[float]]]
    ) -> None:
        """Follow an update that may be undone, by layers here and the `routing` that is known of
        them already."""

    def restore(self) -> None:
        """Take back what has moved ahead."""

    def confirm(self, routing: Sequence[float]) -> None:
        """Follow an update that holds, after it has been followed ahead."""
