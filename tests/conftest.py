"""The environment of processes that tests start.

Signals are as a terminal gives them. torch's C++ is as quiet as `train.py` has it; torch is loaded
before `train.py` here (:mod:`tests.parity.launches`). One cache for all replaces that of the user.
Worlds and commands are forks of a server, unless unit tests alone are run: they start none.
"""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.parity import case_file, draw

UNIT = Path(__file__).parent / "unit"

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

os.environ.pop("COLUMNS", None)  # of whoever looks at the tests

# a shell that starts a job in the background has it ignore Ctrl-C, which children inherit
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# no drawn example fails because the machine is busy
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megapipe")
    group.addoption("--seed", help="what is drawn from long lists of cases (the commit's tree)")
    group.addoption("--case", default="", help="cases of a matrix by their names: a1b2c3d4,...")


def pytest_configure(config: pytest.Config) -> None:
    if seed := config.getoption("--seed"):
        os.environ[draw.VARIABLE] = seed  # workers inherit it
    if not hasattr(config, "workerinput"):
        cache = tempfile.TemporaryDirectory(prefix="megapipe-tests-cache-")
        config.add_cleanup(cache.cleanup)
        user = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        os.environ.setdefault("MPLCONFIGDIR", str(Path(user) / "matplotlib"))  # has its fonts
        os.environ["XDG_CACHE_HOME"] = cache.name  # workers inherit it too


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [case_file.share_line(name) for name in case_file.BUDGETS_S]
    return [f"drawn by --seed {draw.seed()}", *lines]


@pytest.fixture
def chosen(request: pytest.FixtureRequest) -> list[str]:
    """Return the cases that the command line names."""
    return [name for name in request.config.getoption("--case").split(",") if name]


@pytest.fixture(scope="session", autouse=True)
def _server(request: pytest.FixtureRequest) -> None:
    if all(item.path.is_relative_to(UNIT) for item in request.session.items):
        return
    from tests.parity.forked import start_server  # loads torch, which reads what is set above

    start_server()
