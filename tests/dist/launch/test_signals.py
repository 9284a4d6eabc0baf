"""A request to stop that comes at the first moment at which one is heard."""

from __future__ import annotations

import subprocess
import sys
from signal import Signals

import pytest

ASKED_EARLY = """
import os, signal, sys, time
from megapipe.launch.signals import StopRequest

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup

with StopRequest() as stop:
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0.5)  # the thread that hears it has done with it
    assert stop
    stop.leave = lambda error: print(error, flush=True) or 75
    time.sleep(30)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_request_before_there_is_a_way_to_leave(name: str) -> None:
    command = [sys.executable, "-c", ASKED_EARLY, str(int(Signals[name]))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (75, f"stopped by {name} before the first step\n")
