"""Divides a token file: the first documents into one file, the next into another, and so on.

A share is any positive number, relative to the sum of all shares. Documents are not shuffled first.

example: prepare_data.py split data/all data/train=98 data/validation=2
"""

import argparse
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megapipe.command_line import Parser
from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.data.tokens.atomic_files import fresh, refuse_existing
from megapipe.data.tokens.format import without_suffix
from megapipe.data.tokens.join import DocumentFilter, join
from megapipe.data.tokens.verify import verify
from megapipe.errors import ConfigError, DataError

PURPOSE = "divide a token file into several"


def add(parser: Parser) -> None:
    parser.add_argument("prefix", type=Path, metavar="PREFIX", help="file to divide")
    parser.add_argument(
        "outputs",
        nargs="+",
        metavar="OUTPUT=SHARE",
        help="prefix of a new file, and its share of the documents",
    )


def run(given: argparse.Namespace) -> None:
    prefix = without_suffix(given.prefix)
    outputs = [_output(text) for text in given.outputs]
    names = [output for output, _ in outputs]
    if sum(share for _, share in outputs) == math.inf:
        raise ConfigError("the sum of the shares is too large: expected shares such as 98 and 2")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} is given twice: expected different names")
        refuse_existing(name)
    file = TokenFile(prefix)
    verify(file)
    bounds = boundaries([share for _, share in outputs], len(file))
    for name, first, last in zip(names, bounds, bounds[1:], strict=False):
        if first == last:
            raise DataError(f"{name} would have none of the {len(file)} documents of {prefix}")
    for name, first, last in zip(names, bounds, bounds[1:], strict=False):
        with fresh(name) as working, TokenWriter(working, file.tokens.dtype) as writer:
            join([prefix], writer, _between(first, last))
        print(f"{name}: {writer.documents:,} documents, {writer.tokens:,} tokens")


def boundaries(shares: list[float], documents: int) -> list[int]:
    """Return the index of each share's first document, and at the end the number of documents.
    Indices are rounded as in Megatron-LM."""
    total = math.fsum(shares)
    ends = [math.fsum(shares[: i + 1]) / total for i in range(len(shares))]
    return [0, *(round(end * documents) for end in ends[:-1]), documents]


def _between(start: int, stop: int) -> DocumentFilter:
    def choice(first: int, last: int) -> npt.NDArray[np.bool_]:
        numbers = np.arange(first, last)
        return (numbers >= start) & (numbers < stop)

    return choice


def _output(text: str) -> tuple[Path, float]:
    name, _, share = text.rpartition("=")
    try:
        value = float(share)
    except ValueError:
        value = 0.0
    if not name or not 0 < value < math.inf:
        raise ConfigError(f"{text}: expected OUTPUT=SHARE with a share above 0, as data/train=0.98")
    return without_suffix(Path(name)), value
