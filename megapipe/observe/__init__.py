"""Reports of a run: console, log.jsonl, tensorboard, Weights & Biases, provenance.

:func:`build_sinks` makes the :class:`Observer` of a run. The package calls no collective: the
trainer builds one observer, on one rank, and passes the whole job's figures to the observer.
"""

from megapipe.observe.observer import Observer, build_sinks, check_sinks
from megapipe.observe.provenance import package_hash, provenance
from megapipe.observe.record import Sink, StepRecord, ValidationRecord

__all__ = [
    "Observer",
    "Sink",
    "StepRecord",
    "ValidationRecord",
    "build_sinks",
    "check_sinks",
    "package_hash",
    "provenance",
]
