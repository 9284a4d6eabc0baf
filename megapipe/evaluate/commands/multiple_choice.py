"""Multiple choice by log-likelihood. FILE has one question per line:

    {"prompt": "2 + 2 =", "choices": ["3", "4"], "answer": 1}

where "question" may replace "prompt", and answers count from 0. Each choice is scored as the
continuation of the prompt and a space (--delimiter). acc takes the most likely choice, acc_norm the
choice most likely per byte (acc_bytes in lm-evaluation-harness), acc_tokens the one most likely per
token. The standard error follows +-. Of equal choices the first is taken, and the number of ties is
shown.

example: evaluate.py multiple-choice runs/latest --data questions.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megapipe.command_line import Parser
from megapipe.data.corpus.row_count import RowCount
from megapipe.evaluate.commands.arguments import add_common, batch_of, report_rows, show
from megapipe.inference.arguments import add_model, model_of, model_phase

PURPOSE = "multiple choice from JSONL, by log-likelihood"


def add(parser: Parser) -> None:
    add_model(parser)
    what = parser.add_argument_group("questions")
    what.add_argument("--data", type=Path, required=True, metavar="FILE", help="JSONL")
    what.add_argument(
        "--delimiter",
        default=" ",
        metavar="TEXT",
        help="text before each choice (default: a space)",
    )
    what.add_argument(
        "--truncate",
        action="store_true",
        help="remove the beginning of prompts that are longer than the context (default: an error)",
    )
    add_common(parser)


def run(given: argparse.Namespace) -> None:
    from megapipe.evaluate.multiple_choice import answer, read_questions

    batch = batch_of(given)
    count = RowCount()
    questions = list(read_questions(given.data, count))
    model = model_of(given)
    with model_phase(given, "measuring"):
        found = answer(
            model,
            questions,
            delimiter=given.delimiter,
            truncate=given.truncate,
            batch=batch,
        )
    report_rows(given, count.lines(given.data, ""))
    show(given, found.describe(), found.as_json())
