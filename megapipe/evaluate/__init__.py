"""Models measured on texts: perplexity, multiple choice, and the tasks of lm-evaluation-harness.

All of it is log-likelihoods of tokens (:mod:`~megapipe.evaluate.scoring`), by a model at any layout
(:mod:`megapipe.inference`).
"""

from megapipe.evaluate.choices import Choices, Question, answer
from megapipe.evaluate.perplexity import Perplexity, measure
from megapipe.evaluate.scoring import Row, Score, scores

__all__ = ["Choices", "Perplexity", "Question", "Row", "Score", "answer", "measure", "scores"]
