"""Joins token files: all documents of the first, then of the second, and so on.

example: prepare_data.py merge data/all data/books data/web
"""

import argparse
from pathlib import Path

import numpy as np

from megapipe.command_line import Parser
from megapipe.data.prepare.progress import meter
from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.data.tokens.atomic_files import fresh
from megapipe.data.tokens.format import without_suffix
from megapipe.data.tokens.join import copy, documents
from megapipe.data.tokens.verify import verify

PURPOSE = "join token files into one"


def add(parser: Parser) -> None:
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="prefix of the new file")
    parser.add_argument("prefixes", type=Path, nargs="+", metavar="PREFIX", help="files to join")


def run(given: argparse.Namespace) -> None:
    prefixes = [without_suffix(path) for path in given.prefixes]
    files = [TokenFile(prefix) for prefix in prefixes]
    for file in files:
        verify(file)
    dtype = np.result_type(*(file.tokens.dtype for file in files))
    total = sum(file.tokens.nbytes for file in files)
    output = without_suffix(given.output)
    with (
        meter(f"writing {output}", total) as shown,
        fresh(output) as working,
        TokenWriter(working, dtype) as writer,
    ):
        for some in documents(prefixes):
            before = writer.tokens
            copy(some, writer)
            nbytes = (writer.tokens - before) * some.file.tokens.dtype.itemsize
            shown.advance(nbytes, some.last - some.first)
    print(f"{output}: {writer.documents:,} documents, {writer.tokens:,} tokens, {dtype.name}")
