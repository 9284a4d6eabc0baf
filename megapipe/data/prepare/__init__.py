"""Tokenization of corpora into token files, by several processes; continues after a kill."""

from megapipe.data.prepare.cache import Prepared, prepare

__all__ = ["Prepared", "prepare"]
