"""Reads token files in full and checks that every sequence starts where the previous one ends,
every id is in the vocabulary and, in a cache folder, every block matches its checksum.

Training checks only the sizes at its start, and later the ids and blocks of each batch.

example: prepare_data.py verify data/train data/validation --tokenizer ./tokenizer
"""

import argparse
from pathlib import Path

from megapipe.command_line import Parser
from megapipe.data.prepare.progress import meter
from megapipe.data.tokenizer import load_tokenizer
from megapipe.data.tokens import TokenFile
from megapipe.data.tokens.format import without_suffix
from megapipe.data.tokens.verify import verify
from megapipe.errors import ConfigError

PURPOSE = "read every byte of token files and check them"


def add(parser: Parser) -> None:
    parser.add_argument("prefixes", type=Path, nargs="+", metavar="PREFIX", help="files to read")
    vocabulary = parser.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--tokenizer", metavar="NAME", help="as data.tokenizer of the run")
    vocabulary.add_argument("--vocab-size", type=int, metavar="N", help="ids are 0 to N - 1")


def run(given: argparse.Namespace) -> None:
    if given.vocab_size is not None and given.vocab_size < 1:
        raise ConfigError(f"--vocab-size {given.vocab_size}: expected a whole number >= 1")
    vocab_size = given.vocab_size or load_tokenizer(given.tokenizer).vocab_size
    for path in given.prefixes:
        prefix = without_suffix(path)
        file = TokenFile(prefix)
        with meter(f"reading {prefix}", file.tokens.nbytes) as shown:
            verify(file, vocab_size, shown.advance)
        print(f"{prefix}: intact, {len(file):,} documents, {len(file.tokens):,} tokens")
