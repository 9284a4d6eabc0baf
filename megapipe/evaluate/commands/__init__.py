"""The commands of scripts/evaluate.py, one file each."""

from collections.abc import Sequence

from megapipe.command_line import Parser, parser_of
from megapipe.evaluate.commands import choices, harness, perplexity
from megapipe.inference import job

COMMANDS = {"perplexity": perplexity, "choices": choices, "harness": harness}


def parser() -> Parser:
    """The parser of all commands."""
    return parser_of(
        COMMANDS,
        description="A model of a checkpoint, measured on texts, at any layout.",
        epilog="%(prog)s COMMAND --help tells what it takes.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit code of the process."""
    return job.main(parser(), argv)
