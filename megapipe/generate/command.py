"""The command that writes text: ``python scripts/generate.py runs/latest --prompt "def "``."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megapipe.command_line import Parser
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import ConfigError, DataError
from megapipe.generate.chat import Chats, messages_of
from megapipe.generate.generator import End, Generator, Piece, Prompt
from megapipe.generate.sampling import Sampling
from megapipe.inference import job
from megapipe.inference.arguments import add_model, model_of

DESCRIPTION = """\
Continues prompts by the model of a checkpoint. A single text appears as it is written; of several
the first that is not at its end does. The model is given the end of what is there, as many tokens
as it was trained on (train.sequence_length): a longer text goes on, and what left that window has
no influence. A prompt gets the same text whatever others are given with it, and at every layout, up
to rounding; the same prompt given twice gets two.
"""
EXAMPLES = """\
examples:
  %(prog)s runs/latest --prompt "def "
  %(prog)s runs/latest --prompt "class A" --prompt "import " --stop "\\n\\n" --temperature 0
  %(prog)s runs/latest --prompts prompts.txt --json > texts.jsonl
  %(prog)s ./Qwen3-0.6B --chat --system "You are brief." --prompt "Why is the sky blue?"
  python -m megapipe.launch --nproc 4 scripts/generate.py runs/large --tp 2 --pp 2 --prompt "def "
"""


def parser() -> Parser:
    """The parser of the command."""
    top = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    add_model(top)
    what = top.add_argument_group("what to continue (default: an empty document)")
    what.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    what.add_argument("--prompts", metavar="FILE", help="one prompt a line; -: standard input")
    what.add_argument(
        "--chat",
        action="store_true",
        help="a prompt is what a user says, or a conversation, a list of messages in JSON; the "
        "model says what follows, up to the end of its turn",
    )
    what.add_argument("--system", metavar="TEXT", help="system message before each conversation")
    what.add_argument(
        "--chat-template",
        metavar="FILE",
        help="in Jinja (default: data.chat_template of the run, else the tokenizer's)",
    )
    how = top.add_argument_group("how")
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
    output = top.add_argument_group("output").add_mutually_exclusive_group()
    output.add_argument("--line", action="store_true", help="each text on one line")
    output.add_argument(
        "--json",
        action="store_true",
        help='a line {"prompt", "text", "end"} each; end: document, turn, stop or tokens',
    )
    top.set_defaults(run=run)
    return top


def run(given: argparse.Namespace) -> None:
    """Write what is asked for. Raises :class:`~megapipe.errors.MegapipeError`."""
    if given.batch < 1:
        raise ConfigError(f"--batch {given.batch}: expected at least 1")
    if given.chat and not (given.prompt or given.prompts):
        raise ConfigError("--chat: nobody has said anything; expected --prompt or --prompts")
    sampling = Sampling(
        tokens=given.tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        stop=tuple(text.replace("\\n", "\n") for text in given.stop),
        seed=given.seed,
    )
    mesh: ParallelMesh = given.mesh
    texts: list[str] = []
    if mesh.rank == 0:
        texts = read_prompts(given.prompt, given.prompts)
    texts = json.loads(mesh.share(json.dumps(texts)))
    generator = Generator(model_of(given))
    prompts = prompts_of(texts, generator, given)
    context = generator.model.source.context
    for number, prompt in enumerate(prompts, 1):
        if len(prompt.ids) > context and mesh.rank == 0:
            print(
                f"megapipe: prompt {number} has {len(prompt.ids):,} tokens, of which the model "
                f"sees the end: its context is {context:,}",
                file=sys.stderr,
            )
    pieces = in_order(generator.generate(prompts, sampling, batch=given.batch), len(prompts))
    if mesh.rank:
        for _ in pieces:  # the first rank prints
            pass
    elif given.json or given.line:
        show_whole(pieces, texts, given)
    else:
        stream(pieces, [""] * len(texts) if given.chat else texts)


def prompts_of(
    texts: Sequence[str], generator: Generator, given: argparse.Namespace
) -> list[Prompt]:
    """The texts, or conversations, as tokens."""
    if given.chat:
        chats = Chats(generator.model.source, given.chat_template)
        return [chats.prompt(messages_of(text, given.system)) for text in texts]
    for option in ("system", "chat_template"):
        if getattr(given, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} is for --chat")
    return [generator.prompt(text) for text in texts]


def show_whole(
    pieces: Iterator[tuple[int, str, End | None]], prompts: Sequence[str], given: argparse.Namespace
) -> None:
    """Print each text when it is at its end, on a line."""
    text = ""
    for number, part, end in pieces:
        text += part
        if end is None:
            continue
        prompt = prompts[number]
        if given.json:
            print(json.dumps({"prompt": prompt, "text": text, "end": end}), flush=True)
        else:
            shown = text if given.chat else prompt + text
            whole = "".join(c if c.isprintable() else " " for c in shown)
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
    """Write what `argv` asks for; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal need not know every character
    return job.main(parser(), sys.argv[1:] if argv is None else argv)
