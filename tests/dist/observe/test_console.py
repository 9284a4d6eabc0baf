"""The console of a process whose output is no longer read."""

import subprocess
import sys


def test_a_reader_that_goes_away_does_not_change_the_exit_code():
    program = """
import sys, time
from megapipe.observe import Observer
from megapipe.observe.console import ConsoleSink
observer = Observer([ConsoleSink(sys.stdout)])
observer.note("first")
sys.stdin.readline()
for _ in range(3):
    observer.note("x" * 100)
observer.close()
print("trained to the end", file=sys.stderr)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().endswith(" first\n")
    process.stdout.close()
    process.stdin.write("go on\n")
    process.stdin.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert errors.count("console does not accept records") == 1
    assert "trained to the end" in errors
