"""Compares two checkpoints of any layouts: configuration, position in the data, and each tensor,
bit by bit. For each tensor that differs it shows the largest difference of two values, and the norm
of the difference divided by the norm of the first checkpoint's tensor.

example: checkpoint.py diff runs/a runs/b --only "model/*"
"""

import argparse
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.commands.arguments import NEWEST, location
from megapipe.checkpoint.find import find_checkpoint
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.shard import bytes_of
from megapipe.command_line import Parser
from megapipe.errors import CheckpointError, ConfigError
from megapipe.text import print_folded

PURPOSE = "compare two checkpoints"
_ABSENT = "(absent)"


def add(parser: Parser) -> None:
    parser.add_argument("first", type=location, metavar="A", help=NEWEST)
    parser.add_argument("second", type=location, metavar="B", help="likewise")
    parser.add_argument(
        "--only",
        default="*",
        metavar="PATTERN",
        help="compare only tensors whose names match the pattern",
    )
    parser.add_argument(
        "--equal", action="store_true", help="exit with code 5 unless the tensors are bitwise equal"
    )


def run(given: argparse.Namespace) -> None:
    first, second = (find_checkpoint(path, verify=False) for path in (given.first, given.second))
    a, b = first.manifest, second.manifest
    print_folded(f"A: {first.path}, step {a.step:,}", f"B: {second.path}, step {b.step:,}")
    for what, theirs, others in (
        ("layout", a.layout, b.layout),
        ("config", a.config, b.config),
        ("progress", a.coordinates, b.coordinates),
        ("digest", a.digests, b.digests),
    ):
        for key, one, other in _unequal(theirs, others):
            print_folded(f"{what} {key}: {one} | {other}")
    names = sorted(n for n in a.entries.keys() | b.entries.keys() if fnmatchcase(n, given.only))
    if not names:
        raise ConfigError(
            f"--only {given.only}: neither checkpoint has a tensor whose name matches"
        )
    differing = 0
    for name in names:
        if (found := _difference(first, second, name)) is not None:
            differing += 1
            print_folded(f"{name}: {found}")
    print(f"{len(names) - differing:,} of {len(names):,} tensors are bitwise equal")
    if given.equal and differing:
        raise CheckpointError(f"{first.path} and {second.path} differ in {differing:,} tensors")


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key under which the two mappings differ, with both values."""
    for key in sorted(a.keys() | b.keys()):
        one, other = a.get(key, _ABSENT), b.get(key, _ABSENT)
        if one != other:
            yield key, one, other


def _difference(first: Checkpoint, second: Checkpoint, name: str) -> str | None:
    """Describe how a tensor differs between two checkpoints; None if it is bitwise equal."""
    entries = [checkpoint.manifest.entries.get(name) for checkpoint in (first, second)]
    if entries[0] is None or entries[1] is None:
        return f"only in {'B' if entries[0] is None else 'A'}"
    kinds = [(entry.dtype, entry.shape) for entry in entries if entry is not None]
    if kinds[0] != kinds[1]:
        return " | ".join(f"{list(shape)} {dtype}" for dtype, shape in kinds)
    a, b = first.read(name), second.read(name)
    if bytes_of(a) == bytes_of(b):
        return None
    return _distance(a.double(), b.double())


def _distance(a: Tensor, b: Tensor) -> str:
    # inf - inf and nan are differences too, but have no size
    odd = int((~(a.isfinite() & b.isfinite())).sum())
    apart = torch.where(a.isfinite() & b.isfinite(), a - b, torch.zeros_like(a))
    norm = torch.where(a.isfinite(), a, torch.zeros_like(a)).norm().item()
    text = f"at most {apart.abs().max().item():.3g}"
    text += f", norm {apart.norm().item() / norm:.3g} of A's" if norm else ""
    return text + (f", {odd:,} values not finite" if odd else "")
