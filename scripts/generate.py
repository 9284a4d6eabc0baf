"""Text from a checkpoint: ``python scripts/generate.py runs/quickstart --prompt "def "``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from megapipe.errors import MegapipeError
from megapipe.generate import Generator, find_checkpoint


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "path", type=Path, help="a run folder (its newest checkpoint) or a checkpoint"
    )
    parser.add_argument("--prompt", default="", help="text to continue (default: a new document)")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens to add (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: most probable (0.8)")
    parser.add_argument("--top-k", type=int, help="sample among the k most probable (all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (0)")
    parser.add_argument("--device", default="cpu", help="torch device (cpu)")
    parser.add_argument("--line", action="store_true", help="print on one line")
    given = parser.parse_args(argv)
    if given.tokens < 1 or given.temperature < 0 or (given.top_k is not None and given.top_k < 1):
        parser.error("--tokens and --top-k must be at least 1, --temperature at least 0")
    return given


def main() -> int:
    given = parse()
    try:
        generator = Generator(find_checkpoint(given.path), torch.device(given.device))
        ids = list(
            generator.generate(
                given.prompt,
                tokens=given.tokens,
                temperature=given.temperature,
                top_k=given.top_k,
                seed=given.seed,
            )
        )
    except MegapipeError as error:
        print(f"megapipe: error: {error}", file=sys.stderr)
        return error.exit_code
    text = given.prompt + generator.tokenizer.decode(ids)
    if given.line:
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
