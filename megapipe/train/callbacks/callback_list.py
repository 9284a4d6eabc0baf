"""All callbacks of a run as one callback; errors name the user-defined callback that failed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from megapipe.errors import CallbackError, ConfigError, MegapipeError
from megapipe.launch.shutdown import is_communication
from megapipe.observe.record import ValidationRecord
from megapipe.train.callbacks.callback import A_SIGNAL, Callback, Run, Step
from megapipe.train.step_stats import RankRequests
from megapipe.util.user_code import FAILURES, in_one_line
from megapipe.watch.journal import text

_log = logging.getLogger(__name__)


class CallbackList(Callback):
    """Calls the callbacks `first`, then `user`, then `last`; closes them in the reverse order.

    Validation and saving are in `last`, so that `user` callbacks see a step before it is saved.
    """

    def __init__(
        self, first: Sequence[Callback], user: Sequence[Callback], last: Sequence[Callback]
    ) -> None:
        self._all = [*first, *user, *last]
        self._user = list(user)
        self._stopper: str | None = None
        """Name of the first callback that requested to stop on this rank."""

    def begin(self, run: Run) -> None:
        self._each(run, "begin", lambda callback: callback.begin(run))

    def before_step(self, run: Run, step: Step) -> None:
        self._each(run, "before_step", lambda callback: callback.before_step(run, step))

    def requests(self, run: Run) -> RankRequests:
        stop = save = finish = False

        def ask(callback: Callback) -> None:
            nonlocal stop, save, finish
            wished = callback.requests(run)
            if wished.stop and self._stopper is None:
                self._stopper = callback.who
            stop, save = stop or wished.stop, save or wished.save
            finish = finish or wished.finish_save

        self._each(run, "requests", ask)
        return RankRequests(stop, save, finish)

    def stopper(self, run: Run) -> str:
        """Return the name of the callback that requested a stop, or "a signal". Collective."""
        return run.mesh.agree(self._stopper) or A_SIGNAL

    def after_step(self, run: Run, step: Step) -> None:
        self._each(run, "after_step", lambda callback: callback.after_step(run, step))

    def after_validation(self, run: Run, record: ValidationRecord) -> None:
        self._each(run, "after_validation", lambda callback: callback.after_validation(run, record))

    def before_save(self, run: Run, step: int) -> None:
        self._each(run, "before_save", lambda callback: callback.before_save(run, step))

    def after_rewind(self, run: Run, step: int) -> None:
        self._each(run, "after_rewind", lambda callback: callback.after_rewind(run, step))

    def end(self, run: Run) -> None:
        self._each(run, "end", lambda callback: callback.end(run))

    def close(self, run: Run) -> None:
        """Close all callbacks; a second call does nothing."""
        left, self._all = self._all, []
        for callback in reversed(left):
            try:
                callback.close(run)
            except FAILURES as error:
                _log.warning("megapipe: %s", _describe(run, "close", callback, error))

    def _each(self, run: Run, hook: str, call: Callable[[Callback], None]) -> None:
        for callback in self._all:
            run.mesh.journal.set_activity(text(f"{hook} of {type(callback).__name__}"))
            with self._blaming(run, hook, callback):
                call(callback)

    @contextlib.contextmanager
    def _blaming(self, run: Run, hook: str, callback: Callback) -> Iterator[None]:
        """Convert a user-defined callback's exception to CallbackError, unless a MegapipeError."""
        try:
            yield
        except (MegapipeError, torch.OutOfMemoryError):
            raise
        except FAILURES as error:
            if callback not in self._user or is_communication(error):
                raise
            raise CallbackError(_describe(run, hook, callback, error)) from error


def _describe(run: Run, hook: str, callback: Callback, error: BaseException) -> str:
    """Describe an error in one line: callback, hook, rank, error and place."""
    name = type(callback).__name__
    return f"callback {name}, {hook} on rank {run.mesh.rank}: {in_one_line(error)}"


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise :class:`ConfigError` for a value that is not a Callback object, for example a class."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks: {callback!r}: expected an object of a class that derives from Callback"
            )
