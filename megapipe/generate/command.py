"""The generation command: ``python scripts/generate.py runs/latest --prompt "def "``."""

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
from megapipe.generate.generator import End, Generator, Prompt, TokenOutput
from megapipe.generate.sampling import Sampling
from megapipe.inference import job
from megapipe.inference.arguments import add_model, model_of

DESCRIPTION = """\
Continues prompts with the model of a checkpoint. A text is printed while it is generated; several
texts are printed in the order of their prompts. The model sees the last tokens of a text, at most
as many as it was trained on (--context, default: train.sequence_length). Texts may become longer;
tokens that the model no longer sees have no influence. The text for a prompt does not depend on
other prompts or on the layout, up to rounding; a prompt given twice gets two samples.
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
    """Return the parser of the command."""
    top = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    add_model(top)
    what = top.add_argument_group("text to continue (default: an empty document)")
    what.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    what.add_argument(
        "--prompts", metavar="FILE", help="file with one prompt per line; -: standard input"
    )
    what.add_argument(
        "--chat",
        action="store_true",
        help="a prompt is a user's message, or a conversation as a JSON list of messages; the "
        "model writes the assistant's next turn",
    )
    what.add_argument("--system", metavar="TEXT", help="system message before each conversation")
    what.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja template (default: data.chat_template of the run, else the tokenizer's)",
    )
    how = top.add_argument_group("how")
    default = Sampling()
    how.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        default=default.tokens,
        help="maximum number of tokens to add (%(default)s)",
    )
    how.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; \\n is a new line; may be repeated",
    )
    how.add_argument(
        "--temperature",
        type=float,
        default=default.temperature,
        help="divide logits by this number; 0: always the most probable token (%(default)s)",
    )
    how.add_argument(
        "--top-k", type=int, metavar="K", help="sample from the K most probable tokens"
    )
    how.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the fewest tokens with a total probability of at least P",
    )
    how.add_argument(
        "--seed", type=int, default=default.seed, help="seed of the sampling (%(default)s)"
    )
    how.add_argument(
        "--batch", type=int, default=16, help="maximum number of prompts per forward (%(default)s)"
    )
    output = top.add_argument_group("output").add_mutually_exclusive_group()
    output.add_argument("--line", action="store_true", help="print each text on one line")
    output.add_argument(
        "--json",
        action="store_true",
        help='print a line {"prompt", "text", "end"} per text; end: document, turn, stop or tokens',
    )
    top.set_defaults(run=run)
    return top


def run(given: argparse.Namespace) -> None:
    """Generate and print the requested texts. Raises :class:`~megapipe.errors.MegapipeError`."""
    if given.batch < 1:
        raise ConfigError(f"--batch {given.batch}: expected at least 1")
    if given.chat and not (given.prompt or given.prompts):
        raise ConfigError("--chat needs a user's message: pass --prompt or --prompts")
    sampling = sampling_of(given)
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
                f"megapipe: prompt {number} has {len(prompt.ids):,} tokens, but the model "
                f"sees only the last {context:,}, its context",
                file=sys.stderr,
            )
    pieces = in_order(generator.generate(prompts, sampling, batch=given.batch), len(prompts))
    if mesh.rank:
        for _ in pieces:  # only the first rank prints
            pass
    elif given.json or given.line:
        show_whole(pieces, texts, given)
    else:
        stream(pieces, [""] * len(texts) if given.chat else texts)


def sampling_of(given: argparse.Namespace) -> Sampling:
    """Return the sampling that the options describe. Raises ConfigError, which names the option."""
    try:
        return Sampling(
            tokens=given.max_new_tokens,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            stop=tuple(text.replace("\\n", "\n") for text in given.stop),
            seed=given.seed,
        )
    except ConfigError as error:
        field, _, problem = str(error).partition("=")
        option = "max-new-tokens" if field == "tokens" else field.replace("_", "-")
        raise ConfigError(f"--{option} {problem}") from None


def prompts_of(
    texts: Sequence[str], generator: Generator, given: argparse.Namespace
) -> list[Prompt]:
    """Tokenize the texts; with ``--chat`` they are conversations."""
    if given.chat:
        chats = Chats(generator.model.source, given.chat_template)
        return [chats.prompt(messages_of(text, given.system)) for text in texts]
    for option in ("system", "chat_template"):
        if getattr(given, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} needs --chat")
    return [generator.prompt(text) for text in texts]


def show_whole(
    pieces: Iterator[tuple[int, str, End | None]], prompts: Sequence[str], given: argparse.Namespace
) -> None:
    """Print each text on one line as soon as it is complete, with ``--json`` or ``--line``."""
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
    """Return the prompts of the command line and then of the file; one empty prompt if neither."""
    prompts = list(given or ([] if file else [""]))
    if file is not None:
        try:
            data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        except OSError as error:
            raise DataError(f"--prompts {file}: {error.strerror}") from None
        if not data:
            raise DataError(f"--prompts {file} is empty: expected one prompt per line")
        lines = data.decode("utf-8", errors="surrogateescape").removesuffix("\n").split("\n")
        prompts += [line.removesuffix("\r") for line in lines]
    # bytes that are not UTF-8 become U+FFFD
    return [text.encode(errors="surrogateescape").decode(errors="replace") for text in prompts]


def in_order(pieces: Iterator[TokenOutput], prompts: int) -> Iterator[tuple[int, str, End | None]]:
    """Yield (prompt's index, text, end) in the order of prompts, once earlier prompts have
    ended."""
    waiting: list[list[TokenOutput]] = [[] for _ in range(prompts)]
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
    """Print each prompt and then its text as it is generated, with lines between prompts."""
    shown = -1
    for number, text, end in pieces:
        if number > shown:
            shown = number
            if len(prompts) > 1:
                print(f"--- {number + 1} of {len(prompts)} ---")
            print(prompts[number], end="")
        print(text, end="" if end is None else "\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`. Return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not support every character
    return job.main(parser(), sys.argv[1:] if argv is None else argv)
