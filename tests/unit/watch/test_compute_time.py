"""What of an operation is a rank's own time, in moments that a test's clock makes."""

from __future__ import annotations

from megapipe.watch.journal import Journal


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def test_waits_in_operations_are_not_own_time() -> None:
    journal, clock = Journal(), Clock()
    own, line = journal.own_time, journal.counter("peers", [0, 1])
    own.stamp = clock

    def passes(seconds: int) -> None:
        clock.now += seconds

    def operation() -> None:
        passes(1)
        assert line.wait(line.count(), lambda: passes(10) or "arrived") == "arrived"
        passes(2)
        line.wait(line.count(), lambda: passes(20))

    def run() -> None:
        own.operation(operation) if own.on else operation()

    run()
    own.start()
    line.wait(line.count(), lambda: passes(100))  # between operations: no part of any
    run()
    passes(1000)
    run()
    moments = own.stop()
    assert sum(moments[1::2]) - sum(moments[::2]) == 2 * (1 + 2)
    run()
    line.wait(line.count(), lambda: passes(1))
    assert own.stop() == moments, "what comes after the stop does not count"
    own.start()
    assert own.stop() == []


def test_an_operation_that_fails_leaves_nothing() -> None:
    """Results may end a step there, and the run goes back."""
    journal, clock = Journal(), Clock()
    own, line = journal.own_time, journal.counter("peers", [0, 1])
    own.stamp = clock
    own.start()

    def fail() -> None:
        raise ValueError

    for call in (fail, lambda: line.wait(line.count(), fail)):
        try:
            own.operation(call)
        except ValueError:
            own.stop()
        own.start()
        line.wait(line.count(), lambda: None)
        assert own.stop() == [], "outside of operations again"
