"""Requests to stop: at the first moment at which one is heard, and again."""

from __future__ import annotations

import subprocess
import sys
import time
from signal import SIGINT, SIGTERM, Signals

import pytest

from megapipe.launch.signals import REPEAT_S

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


ASKED_AGAIN = """
import signal, time
from megapipe.launch.signals import Interrupts, StopRequest

def tell(number):
    print(number.name, flush=True)
    time.sleep(30)

with {listener}() as stop:
    stop.phase, stop.interrupt = "training", tell
    print("hears", flush=True)
    time.sleep(30)
"""


@pytest.mark.parametrize(
    ("listener", "number", "counts"),
    [("StopRequest", SIGTERM, 3), ("StopRequest", SIGINT, 3), ("Interrupts", SIGINT, 2)],
)
def test_a_signal_counts_again_after_a_second(listener: str, number: Signals, counts: int) -> None:
    """The one that ends the process has the others told, and the next does not wait for that."""
    command = [sys.executable, "-c", ASKED_AGAIN.format(listener=listener)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hears\n"
        for _ in range(counts - 1):
            for _ in range(2):
                process.send_signal(number)
                time.sleep(0.2)
            assert process.poll() is None
            time.sleep(REPEAT_S)
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        assert process.stdout.read() == f"{number.name}\n"
