"""Deadlines of a process that is suspended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

SUSPENDED = """
import threading, time
from megapipe.launch.deadline import is_set_within
ready = threading.Event()
def get_ready():
    time.sleep(0.2)
    print("begun", flush=True)
    for _ in range(20):
        time.sleep(0.01)
    ready.set()
threading.Thread(target=get_ready).start()
print(is_set_within(ready, 1))
"""


def test_a_process_that_was_suspended_is_not_late() -> None:
    command = [sys.executable, "-c", SUSPENDED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate()[0] == "True\n"
