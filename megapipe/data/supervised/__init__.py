"""Supervised samples, made of examples: prompt and completion, or a conversation. Only the text
that the model should write counts in the loss."""

from megapipe.data.supervised.corpus import Examples, prepare_examples
from megapipe.data.supervised.dataset import ExampleDataset, count_too_long

__all__ = ["ExampleDataset", "Examples", "count_too_long", "prepare_examples"]
