"""The commands of scripts/prepare_data.py, one file each."""

from collections.abc import Sequence

from megapipe.command_line import Parser, parser_of, run_command
from megapipe.data.commands import inspect, merge, split, tokenize, train_tokenizer, verify

COMMANDS = {
    "tokenize": tokenize,
    "tokenizer": train_tokenizer,
    "inspect": inspect,
    "verify": verify,
    "merge": merge,
    "split": split,
}


def parser() -> Parser:
    """The parser of all commands."""
    return parser_of(
        COMMANDS,
        description="Data ahead of a run: texts to token files, and token files to others.",
        epilog="%(prog)s COMMAND --help tells what it takes. Options alone are those of tokenize.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit code of the process."""
    options_alone = not argv or (argv[0].startswith("-") and argv[0] not in ("--help", "-h"))
    return run_command(parser(), ["tokenize", *argv] if options_alone else argv)
