"""The commands of scripts/evaluate.py, one file each."""

from collections.abc import Sequence

from megapipe.command_line import Parser, parser_of
from megapipe.evaluate.commands import harness, multiple_choice, perplexity
from megapipe.inference import job

COMMANDS = {"perplexity": perplexity, "multiple-choice": multiple_choice, "harness": harness}


def parser() -> Parser:
    """Return the parser of all commands."""
    return parser_of(
        COMMANDS,
        description="Measure the model of a checkpoint on texts, in any layout.",
        epilog="%(prog)s COMMAND --help explains a command.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command, and return the exit code of the process."""
    return job.main(parser(), argv)
