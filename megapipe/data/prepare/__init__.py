"""Corpora become token files, once, by several processes, and again from where they were killed."""

from megapipe.data.prepare.cache import Prepared, prepare

__all__ = ["Prepared", "prepare"]
