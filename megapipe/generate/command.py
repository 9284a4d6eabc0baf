"""The command that writes text: ``python scripts/generate.py runs/quickstart --prompt "def "``."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megapipe.checkpoint.find import find_checkpoint
from megapipe.errors import ConfigError, DataError, MegapipeError
from megapipe.generate.generator import End, Generator, Piece
from megapipe.generate.sampling import Sampling

DESCRIPTION = """\
Continues prompts by the model of a checkpoint. A single text appears as it is written; of several
the first that is not at its end does. The model is given the end of what is there, as many tokens
as it was trained on (train.sequence_length): a longer text goes on, and what left that window has
no influence. A prompt gets the same text whatever others are given with it, up to rounding; the
same prompt given twice gets two.
"""
EXAMPLES = """\
examples:
  %(prog)s runs/quickstart --prompt "def "
  %(prog)s runs/quickstart --prompt "class A" --prompt "import " --stop "\\n\\n" --temperature 0
  %(prog)s runs/quickstart --prompts prompts.txt --json > texts.jsonl
  echo "def main" | %(prog)s runs/quickstart --prompts -
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path", type=Path, help="a run folder (its newest intact checkpoint) or a checkpoint"
    )
    what = parser.add_argument_group("what to continue (default: an empty document)")
    what.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    what.add_argument("--prompts", metavar="FILE", help="one prompt a line; -: standard input")
    how = parser.add_argument_group("how")
    default = Sampling()
    how.add_argument(
        "--tokens", type=int, default=default.tokens, help="most tokens to add (%(default)s)"
    )
    how.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; \\n is a new line; may be repeated",
    )
    how.add_argument(
        "--temperature",
        type=float,
        default=default.temperature,
        help="logits are divided by it; 0: always the most probable token (%(default)s)",
    )
    how.add_argument("--top-k", type=int, metavar="K", help="choose among the K most probable")
    how.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="choose among the fewest that have probability P together",
    )
    how.add_argument("--seed", type=int, default=default.seed, help="of the choices (%(default)s)")
    how.add_argument(
        "--batch", type=int, default=16, help="most prompts side by side (%(default)s)"
    )
    how.add_argument("--device", default="cpu", help="torch device (%(default)s)")
    output = parser.add_argument_group("output").add_mutually_exclusive_group()
    output.add_argument("--line", action="store_true", help="each text on one line")
    output.add_argument(
        "--json",
        action="store_true",
        help='a line {"prompt", "text", "end"} each; end: document, stop or tokens',
    )
    given = parser.parse_args(argv)
    if given.batch < 1:
        parser.error("--batch must be at least 1")
    return given


def run(given: argparse.Namespace) -> None:
    """Write what is asked for. Raises :class:`MegapipeError`."""
    sampling = Sampling(
        tokens=given.tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        stop=tuple(text.replace("\\n", "\n") for text in given.stop),
        seed=given.seed,
    )
    prompts = read_prompts(given.prompt, given.prompts)
    generator = Generator(find_checkpoint(given.path), device_named(given.device))
    for number, prompt in enumerate(prompts, 1):
        tokens = len(generator.ids(prompt))
        if tokens > generator.context:
            print(
                f"megapipe: prompt {number} has {tokens:,} tokens, of which the model sees the "
                f"end: it was trained on {generator.context:,}",
                file=sys.stderr,
            )
    pieces = in_order(generator.generate(prompts, sampling, batch=given.batch), len(prompts))
    if not given.json and not given.line:
        stream(pieces, prompts)
        return
    text = ""
    for number, part, end in pieces:
        text += part
        if end is None:
            continue
        prompt = prompts[number]
        if given.json:
            print(json.dumps({"prompt": prompt, "text": text, "end": end}), flush=True)
        else:
            whole = "".join(c if c.isprintable() else " " for c in prompt + text)
            print(" ".join(whole.split()), flush=True)
        text = ""


def read_prompts(given: Sequence[str] | None, file: str | None) -> list[str]:
    """The prompts of the command line, then those of a file; one empty prompt without both."""
    prompts = list(given or ([] if file else [""]))
    if file is not None:
        try:
            data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        except OSError as error:
            raise DataError(f"--prompts {file}: {error.strerror}") from None
        if not data:
            raise DataError(f"--prompts {file}: it is empty, expected one prompt a line")
        lines = data.decode("utf-8", errors="surrogateescape").removesuffix("\n").split("\n")
        prompts += [line.removesuffix("\r") for line in lines]
    # bytes that are no UTF-8 are no text
    return [text.encode(errors="surrogateescape").decode(errors="replace") for text in prompts]


def device_named(name: str) -> torch.device:
    """The device `name`, after a test that it works; raises :class:`ConfigError`."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device


def in_order(pieces: Iterator[Piece], prompts: int) -> Iterator[tuple[int, str, End | None]]:
    """(prompt, text, end) prompt after prompt, each as soon as those before it are at an end."""
    waiting: list[list[Piece]] = [[] for _ in range(prompts)]
    current = 0
    for piece in pieces:
        waiting[piece.prompt].append(piece)
        while current < prompts and waiting[current]:
            ready, waiting[current] = waiting[current], []
            for each in ready:
                yield current, each.text, each.end
            if ready[-1].end is None:
                break
            current += 1


def stream(pieces: Iterator[tuple[int, str, End | None]], prompts: Sequence[str]) -> None:
    """Print the texts behind their prompts as they come, with a line before each of several."""
    shown = -1
    for number, text, end in pieces:
        if number > shown:
            shown = number
            if len(prompts) > 1:
                print(f"--- {number + 1} of {len(prompts)} ---")
            print(prompts[number], end="")
        print(text, end="" if end is None else "\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal need not know every character
    try:
        run(given)
    except MegapipeError as error:
        print(f"megapipe: error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print()
        return 130
    return 0
