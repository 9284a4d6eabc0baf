"""Fixtures of what several files here observe."""

from tests.parity.observed import make_record, wandb_home

__all__ = ["make_record", "wandb_home"]
