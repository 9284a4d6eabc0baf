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
    """Return the parser of all commands."""
    return parser_of(
        COMMANDS,
        description="Prepare data before a run: tokenize texts, and inspect, verify, merge and "
        "split token files.",
        epilog="%(prog)s COMMAND --help explains a command. Without a command, tokenize is "
        "assumed.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code of the process."""
    options_alone = not argv or (argv[0].startswith("-") and argv[0] not in ("--help", "-h"))
    return run_command(parser(), ["tokenize", *argv] if options_alone else argv)
