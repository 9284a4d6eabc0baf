"""Shows where a checkpoint comes from and what it holds. --config prints the run's configuration as
arguments for train.py, --tensors the smallest and largest value of each tensor.

example: checkpoint.py inspect runs/latest --tensors "model/*norm*"
"""

import argparse
import json
from collections import defaultdict
from fnmatch import fnmatchcase
from math import prod

from megapipe.checkpoint.commands.arguments import NEWEST, layout_of, location, size_of, written
from megapipe.checkpoint.find import find_checkpoint
from megapipe.checkpoint.reader import Checkpoint
from megapipe.command_line import Parser
from megapipe.errors import ConfigError
from megapipe.text import count_noun, print_folded

PURPOSE = "show what a checkpoint contains"


def add(parser: Parser) -> None:
    parser.add_argument("path", type=location, metavar="PATH", help=NEWEST)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--config", action="store_true", help="print only key=value lines")
    shown.add_argument(
        "--tensors",
        nargs="?",
        const="*",
        metavar="PATTERN",
        help='read tensors and show the range of their values (as in "model/*"; default: all)',
    )


def run(given: argparse.Namespace) -> None:
    checkpoint = find_checkpoint(given.path, verify=False)
    if given.config:
        for key, value in checkpoint.config.items():
            print(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    elif given.tensors is not None:
        _tensors(checkpoint, given.tensors)
    else:
        _summary(checkpoint)


def _summary(checkpoint: Checkpoint) -> None:
    manifest = checkpoint.manifest
    print_folded(f"{checkpoint.path}: step {manifest.step:,} of run {manifest.run_id}")
    print_folded(f"written {written(checkpoint.path)} by {layout_of(checkpoint)}")
    for key, value in manifest.coordinates.items():
        print_folded(f"{key}: {json.dumps(value)}")
    for key, digest in manifest.digests.items():
        print_folded(f"{key}: SHA-256 {digest}")
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name, entry in manifest.entries.items():
        kinds[name.split("/")[0], entry.dtype].append(prod(entry.shape))
    for (kind, dtype), sizes in sorted(kinds.items()):
        print_folded(
            f"{kind}: {count_noun(len(sizes), 'tensor')}, {sum(sizes):,} values in {dtype}"
        )
    nbytes = sum(record.bytes for record in manifest.files.values())
    print_folded(f"{count_noun(len(manifest.files), 'file')}, {size_of(nbytes)}")


def _tensors(checkpoint: Checkpoint, pattern: str) -> None:
    names = [name for name in checkpoint.names() if fnmatchcase(name, pattern)]
    if not names:
        raise ConfigError(f"--tensors {pattern}: no name matches, of {len(checkpoint.names())}")
    for name in names:
        entry = checkpoint.manifest.entries[name]
        line = f"{name} {list(entry.shape)} {entry.dtype}"
        values = checkpoint.read(name).double()
        finite = values[values.isfinite()]
        if finite.numel():
            rms = finite.square().mean().sqrt().item()
            line += f": {finite.min().item():.6g} to {finite.max().item():.6g}, rms {rms:.6g}"
        if odd := values.numel() - finite.numel():
            line += f", {odd:,} not finite"
        print_folded(line)
