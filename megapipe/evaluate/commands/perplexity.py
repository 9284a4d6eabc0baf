"""Perplexity and bits per byte of texts. Each token of a document is scored once, given the earlier
tokens of the document that are in the same window. The first token is scored given the token with
which the model's texts begin: for a run the end-of-document token, otherwise the tokenizer's start
token (for example <s>) or, if it has none, its end-of-document token. With --no-start the first
token is only read. End marks in a token file are tokens without bytes.

example: evaluate.py perplexity runs/latest --data texts.jsonl --stride 128
         evaluate.py perplexity ./Qwen3-0.6B --text "Some text." --json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from megapipe.command_line import Parser
from megapipe.config.data import DataConfig
from megapipe.data.corpus.row_count import RowCount
from megapipe.errors import ConfigError
from megapipe.evaluate.commands.arguments import add_common, batch_of, report_rows, show
from megapipe.inference.arguments import add_model, model_of, model_phase

PURPOSE = "perplexity and bits per byte of texts or a token file"


def add(parser: Parser) -> None:
    add_model(parser)
    what = parser.add_argument_group("texts")
    what.add_argument(
        "--data",
        metavar="SOURCE",
        help="as data.source: a file or folder of texts, JSONL or tables, or a token file",
    )
    what.add_argument(
        "--text-field",
        default="text",
        metavar="FIELD",
        help="field that holds the text in JSONL and tables (default: %(default)s)",
    )
    what.add_argument("--text", action="append", metavar="TEXT", help="a document; may be repeated")
    what.add_argument(
        "--joined",
        action="store_true",
        help="join all documents, with end marks between them, as training does",
    )
    how = parser.add_argument_group("windows")
    how.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="tokens between the starts of two windows, at most the context (default: the context)",
    )
    how.add_argument("--no-start", action="store_true", help="do not score the first token")
    add_common(parser)


def run(given: argparse.Namespace) -> None:
    from megapipe.evaluate.perplexity import measure
    from megapipe.evaluate.texts import Document, joined, of_source, of_texts

    if (given.data is None) == (given.text is None):
        raise ConfigError("expected either --data or --text")
    batch = batch_of(given)
    model = model_of(given)
    context, tokenizer = model.source.context, model.source.tokenizer
    if given.stride is not None and not 1 <= given.stride <= context:
        raise ConfigError(f"--stride {given.stride}: expected 1 to {context}, the context")
    count = RowCount()
    documents: Iterable[Document]
    if given.text is not None:
        documents = of_texts(given.text, tokenizer)
    else:
        config = DataConfig(source=given.data, text_field=given.text_field)
        documents = of_source(config, tokenizer, count)
    if given.joined:
        documents = joined(documents, tokenizer.eod)
    with model_phase(given, "measuring"):
        found = measure(
            model, documents, stride=given.stride, unconditioned=not given.no_start, batch=batch
        )
    report_rows(given, count.lines(given.data, given.text_field))
    show(given, found.describe(), found.as_json())
