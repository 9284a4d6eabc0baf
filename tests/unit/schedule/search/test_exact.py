"""The constraint solver against the stored optima; skipped without OR-Tools."""

import signal
import threading
from fractions import Fraction

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.memory import peak_weighted
from megapipe.schedule.placement import Placement, loop
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.search import PLACEMENTS
from megapipe.schedule.timing.simulate import simulate
from tests.unit.schedule.search.optima import OPTIMA, accounting

pytest.importorskip("ortools", reason="the extra `exact` is not installed")
from megapipe.schedule.search.exact import solve
from megapipe.schedule.search.solver import new_model, solved


@pytest.mark.parametrize(
    ("name", "p", "m", "cost", "limits", "freed", "objective", "optimum"), OPTIMA
)
def test_stored_optima_are_proved(name, p, m, cost, limits, freed, objective, optimum):
    exact = solve(
        PLACEMENTS[name](p),
        m,
        cost,
        activation_limit=limits,
        objective=objective,
        **accounting(freed),
    )
    assert exact.proved
    assert exact.value == exact.bound == optimum
    validate(exact.schedule)
    timeline = simulate(exact.schedule, cost)
    assert exact.value == (timeline.makespan if objective == "makespan" else max(timeline.spans))
    peaks = peak_weighted(exact.schedule, Fraction(freed))
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


def test_fractions_stay_exact():
    exact = solve(loop(3), 4, Cost(Fraction(1, 3), Fraction(1, 3), Fraction(1, 3)))
    assert exact.value == exact.bound == 4 + 2 * Fraction(1, 3)


def test_floats_are_refused():
    with pytest.raises(ScheduleError, match="whole numbers or fractions, not floats"):
        solve(loop(2), 2, Cost(F=1.5))


def test_gathers_and_reductions_are_refused():
    with pytest.raises(ScheduleError, match="gathers and reductions that take no time"):
        solve(loop(2), 2, Cost(reduce=1))


def test_span_needs_first_starts_that_no_order_delays():
    late = Placement(2, ((0, 0, 1),))
    with pytest.raises(ScheduleError, match='objective "span" needs a placement'):
        solve(late, 2, Cost(), objective="span")
    assert solve(late, 2, Cost()).proved


def test_a_limit_below_one_microbatch():
    with pytest.raises(ScheduleError, match="too small; it must be at least 1, so that"):
        solve(loop(2), 2, Cost(), activation_limit=Fraction(1, 2))


def test_ctrl_c_stops_the_solver_and_keeps_its_meaning():
    handler = signal.getsignal(signal.SIGINT)
    model = new_model("test")
    factors = [model.new_int_var(3, 2**31, name) for name in "ab"]
    model.add_multiplication_equality(1_073_741_827 * 1_073_741_831, factors)  # two primes
    main = threading.main_thread().ident
    threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        solved(model, factors, seconds=300)
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # kills the process if the solver has changed it
