"""Starts the recording in each process that a server forks, for the test that has asked for it.

Servers load it, and only while tests are recorded (:mod:`tests.running.coverage_recorder`).
"""

import multiprocessing.process
import os
from typing import Any

import coverage

_bootstrap = multiprocessing.process.BaseProcess._bootstrap  # type: ignore[attr-defined]


def _bootstrap_recorded(process: Any, *args: Any) -> Any:
    os.environ.update(process._config["recorded"])
    coverage.process_startup()
    return _bootstrap(process, *args)


multiprocessing.process.BaseProcess._bootstrap = _bootstrap_recorded  # type: ignore[attr-defined]
