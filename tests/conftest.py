"""The surroundings of processes that tests start: signals as a terminal gives them, torch's C++ as
quiet as `train.py` has it, before which it is loaded here (:mod:`tests.parity.launches`), and the
server that worlds and commands are forks of."""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# a shell that starts a job in the background has it ignore Ctrl-C, which children inherit
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# no drawn example fails because the machine is busy
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    from tests.parity.forked import start_server  # loads torch, which reads what is set above

    start_server()
