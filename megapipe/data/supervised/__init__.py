"""Supervised samples: examples of prompts and completions, or of conversations, in which only what
is to be written counts in the loss."""

from megapipe.data.supervised.corpus import Examples, prepare_examples
from megapipe.data.supervised.dataset import ExampleDataset, count_too_long

__all__ = ["ExampleDataset", "Examples", "count_too_long", "prepare_examples"]
