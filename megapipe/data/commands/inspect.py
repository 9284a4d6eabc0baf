"""Shows the content of a token file: sizes, lengths of documents, and the first documents.

example: prepare_data.py inspect data/train --tokenizer ./tokenizer --documents 3
"""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megapipe.command_line import Parser
from megapipe.data.tokenizer import load_tokenizer
from megapipe.data.tokens import TokenFile
from megapipe.data.tokens.format import without_suffix
from megapipe.data.tokens.verify import verify
from megapipe.errors import ConfigError
from megapipe.text import print_folded

PURPOSE = "show what a token file contains"
_WIDTH = 50
_SHOWN_TOKENS = 60


def add(parser: Parser) -> None:
    parser.add_argument("prefix", type=Path, metavar="PREFIX", help="the token file")
    parser.add_argument("--tokenizer", metavar="NAME", help="show texts, not ids")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first document to show")
    parser.add_argument(
        "--documents", type=int, default=2, metavar="N", help="documents to show (default: 2)"
    )


def run(given: argparse.Namespace) -> None:
    if given.documents < 0:
        raise ConfigError(f"--documents {given.documents}: expected a whole number >= 0")
    file = TokenFile(without_suffix(given.prefix))
    verify(file)
    if not 0 <= given.first < max(len(file), 1):
        raise ConfigError(f"--first {given.first}: expected 0 to {max(len(file) - 1, 0)}")
    tokens = file.tokens
    print(f"{file.path}: {tokens.dtype.name}, {tokens.nbytes:,} bytes")
    print(f"{len(file):,} documents in {len(file.lengths):,} sequences, {len(tokens):,} tokens")
    if not len(file):
        return
    shortest, longest, counts = lengths(file)
    print(
        f"tokens of a document: {shortest:,} to {longest:,}, {len(tokens) / len(file):,.1f} on "
        "average"
    )
    for line in histogram(counts):
        print(line)
    tokenizer = load_tokenizer(given.tokenizer) if given.tokenizer else None
    last = min(given.first + given.documents, len(file))
    starts = file.starts(file.documents[given.first : last + 1]).tolist()
    for number, start, stop in zip(range(given.first, last), starts, starts[1:], strict=False):
        ids = file.read(start, min(stop, start + _SHOWN_TOKENS)).tolist()
        known = tokenizer is not None and all(0 <= i < tokenizer.vocab_size for i in ids)
        text = repr(tokenizer.decode(ids)) if tokenizer and known else " ".join(map(str, ids))
        more = " ..." if stop - start > _SHOWN_TOKENS else ""
        print_folded(f"document {number}, {stop - start:,} tokens: {text}{more}")


def lengths(file: TokenFile) -> tuple[int, int, npt.NDArray[np.int64]]:
    """Return the number of tokens of the shortest and the longest document, and a histogram: the
    number of documents with 0, 1, 2 to 3, 4 to 7 tokens, and so on."""
    counts = np.zeros(65, np.int64)
    shortest, longest = 2**63, 0
    for found in file.document_lengths():
        shortest, longest = min(shortest, int(found.min())), max(longest, int(found.max()))
        _, exponents = np.frexp(found.astype(np.float64))
        counts += np.bincount(exponents, minlength=65)
    return shortest, longest, counts


def histogram(counts: npt.NDArray[np.int64]) -> list[str]:
    """Return the lines of a bar chart of `counts` (see :func:`lengths`): one line for each power of
    two, from the lowest to the highest that has documents."""
    (filled,) = counts.nonzero()
    lines = []
    for exponent in range(filled[0], filled[-1] + 1):
        least = 2 ** int(exponent) // 2
        bar = "#" * -(-int(counts[exponent]) * _WIDTH // int(counts.max()))
        lines.append(f"{least:>12,}+ {counts[exponent]:>12,} {bar}".rstrip())
    return lines
