"""Evaluation of models on texts: perplexity, multiple choice, and lm-evaluation-harness tasks.

All of these use log-likelihoods of tokens (:mod:`~megapipe.evaluate.scoring`), from a model in any
layout (:mod:`megapipe.inference`).
"""

from megapipe.evaluate.multiple_choice import MultipleChoice, Question, answer
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
