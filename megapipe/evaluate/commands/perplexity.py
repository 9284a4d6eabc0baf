"""Perplexity and bits per byte of texts. Each token of a document is scored once, given the tokens
before it in the document, as many as its window has. The first token is scored given what the
model's texts begin with: in a run the end-of-document token, elsewhere the tokenizer's first token
(<s>, say) or, if it has none, its end-of-document token. With --no-start it is read and not scored.
End marks in a token file are tokens of no bytes.

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
from megapipe.evaluate.commands.arguments import add_common, batch_of, show, tell_rows
from megapipe.inference.arguments import add_model, model_of, model_phase

PURPOSE = "perplexity and bits per byte of texts or a token file"


def add(parser: Parser) -> None:
    add_model(parser)
    what = parser.add_argument_group("texts")
    what.add_argument(
        "--data",
        metavar="SOURCE",
        help="as data.source: a file or folder of texts, rows or tables, or a token file",
    )
    what.add_argument(
        "--text-field", default="text", metavar="FIELD", help="of rows (default: %(default)s)"
    )
    what.add_argument("--text", action="append", metavar="TEXT", help="a document; may be repeated")
    what.add_argument(
        "--joined",
        action="store_true",
        help="all documents as one, with end marks between them, as training reads them",
    )
    how = parser.add_argument_group("windows")
    how.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="tokens by which a window moves on, at most the context (default: the context)",
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
    tell_rows(given, count.lines(given.data, given.text_field))
    show(given, found.describe(), found.as_json())
