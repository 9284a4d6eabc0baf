"""A fixture of several files here."""

from tests.parity.observed import make_record

__all__ = ["make_record"]
