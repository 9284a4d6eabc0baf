"""All callbacks of a run as one, which names the user's callback that raises an error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from megapipe.errors import CallbackError, ConfigError, MegapipeError
from megapipe.launch.shutdown import is_communication
from megapipe.observe.record import ValidationRecord
from megapipe.train.callbacks.callback import A_SIGNAL, Callback, Run, Step
from megapipe.train.totals import Wishes
from megapipe.util.user_code import FAILURES, in_one_line
from megapipe.watch.journal import text

_log = logging.getLogger(__name__)


class CallbackList(Callback):
    """Calls `first`, then those of the `user`, then `last`; closes them in the reverse order.

    Validation and saving are `last`, so that the user's have seen a step before it is saved.
    """

    def __init__(
        self, first: Sequence[Callback], user: Sequence[Callback], last: Sequence[Callback]
    ) -> None:
        self._all = [*first, *user, *last]
        self._user = list(user)
        self._stopper: str | None = None
        """The first callback that has wished to stop on this rank."""

    def begin(self, run: Run) -> None:
        self._each(run, "begin", lambda callback: callback.begin(run))

    def before_step(self, run: Run, step: Step) -> None:
        self._each(run, "before_step", lambda callback: callback.before_step(run, step))

    def wishes(self, run: Run) -> Wishes:
        stop = save = finish = False

        def ask(callback: Callback) -> None:
            nonlocal stop, save, finish
            wished = callback.wishes(run)
            if wished.stop and self._stopper is None:
                self._stopper = callback.who
            stop, save = stop or wished.stop, save or wished.save
            finish = finish or wished.finish

        self._each(run, "wishes", ask)
        return Wishes(stop, save, finish)

    def stopper(self, run: Run) -> str:
        """Who has asked to stop the run, the same text on all ranks; all of them call it."""
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
                _log.warning("megapipe: %s", _told(run, "close", callback, error))

    def _each(self, run: Run, hook: str, call: Callable[[Callback], None]) -> None:
        for callback in self._all:
            run.mesh.journal.set_activity(text(f"{hook} of {type(callback).__name__}"))
            with self._blaming(run, hook, callback):
                call(callback)

    @contextlib.contextmanager
    def _blaming(self, run: Run, hook: str, callback: Callback) -> Iterator[None]:
        """Raise a user's error as :class:`CallbackError`; those with a report of their own pass."""
        try:
            yield
        except (MegapipeError, torch.OutOfMemoryError):
            raise
        except FAILURES as error:
            if callback not in self._user or is_communication(error):
                raise
            raise CallbackError(_told(run, hook, callback, error)) from error


def _told(run: Run, hook: str, callback: Callback, error: BaseException) -> str:
    """One line for an error: the callback, the hook, the rank, and what was raised where."""
    name = type(callback).__name__
    return f"callback {name}, {hook} on rank {run.mesh.rank}: {in_one_line(error)}"


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise :class:`ConfigError` for anything but a Callback object, such as a class."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks: {callback!r}: expected an object of a class that derives from Callback"
            )
