"""Models measured on texts: perplexity, multiple choice, and the tasks of lm-evaluation-harness.

All of it is log-likelihoods of tokens (:mod:`~megapipe.evaluate.scoring`), by a model at any layout
(:mod:`megapipe.inference`).
"""

from megapipe.evaluate.choices import MultipleChoice, Question, answer
from megapipe.evaluate.perplexity import Perplexity, measure
from megapipe.evaluate.scoring import Score, ScoredRow, scores

__all__ = [
    "MultipleChoice",
    "Perplexity",
    "Question",
    "Score",
    "ScoredRow",
    "answer",
    "measure",
    "scores",
]
