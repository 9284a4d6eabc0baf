"""Multiple choice by log-likelihood. FILE has a question a line:

    {"prompt": "2 + 2 =", "choices": ["3", "4"], "answer": 1}

where "question" may stand for "prompt", and answers count from 0. Each choice is scored as what
follows the prompt and a space (--delimiter). acc takes the most likely one, acc_norm the most
likely by its bytes (acc_bytes in lm-evaluation-harness), acc_tokens by its tokens; behind +- is the
standard error. Of equal choices the first is taken, and how often is said.

example: evaluate.py choices runs/latest --data questions.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megapipe.command_line import Parser
from megapipe.data.corpus.row_count import RowCount
from megapipe.evaluate.commands.arguments import add_common, batch_of, show, tell_rows
from megapipe.inference.arguments import add_model, model_of, model_phase

PURPOSE = "multiple choice from JSONL, by log-likelihood"


def add(parser: Parser) -> None:
    add_model(parser)
    what = parser.add_argument_group("questions")
    what.add_argument("--data", type=Path, required=True, metavar="FILE", help="JSONL")
    what.add_argument(
        "--delimiter", default=" ", metavar="TEXT", help="before each choice (default: a space)"
    )
    what.add_argument(
        "--truncate",
        action="store_true",
        help="cut the beginnings off prompts that are longer than the context (default: an error)",
    )
    add_common(parser)


def run(given: argparse.Namespace) -> None:
    from megapipe.evaluate.choices import answer, read_questions

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
    tell_rows(given, count.lines(given.data, ""))
    show(given, found.describe(), found.as_json())
