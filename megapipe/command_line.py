"""Parsers, one-line errors and exit codes, for all programs with commands."""

import argparse
import atexit
import contextlib
import copy
import gc
import io
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TextIO

from megapipe.errors import ConfigError, Interrupted, LaunchError, MegapipeError, Preempted
from megapipe.text import is_terminal, without_secrets
from megapipe.util.old_options import with_new_command, with_new_options
from megapipe.util.paths import temporary_folder_problem

TRACEBACK = "--traceback"
"""Option that prints the traceback of an error."""

INTERRUPTED = Interrupted.exit_code
"""Exit code after Ctrl-C, the same as in shells."""

Commands = argparse._SubParsersAction  # argparse has no public name for it


_UNBROKEN = re.compile(r"""(?:-\S+ (?=[^-]))?(?:"[^"]*"|'[^']*'|\S)+""")
"""Pattern of text that is not wrapped in a command: a word, quoted text, an option with value."""
_LINE = re.compile(r"\s|examples?:")


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that fills paragraphs to the terminal's width. Indented lines, and lines that
    begin with "example:", are commands and stay separate lines. A command wider than the terminal
    is wrapped after a backslash."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        paragraph: list[str] = []
        for line in (*text.strip().splitlines(), ""):
            if line.strip() and _LINE.match(line) is None:
                paragraph.append(line)
                continue
            lines += textwrap.wrap(
                " ".join(paragraph), width, break_long_words=False, break_on_hyphens=False
            )
            paragraph = []
            lines += _continued(line, width)
        return "\n".join(f"{indent}{line}" for line in lines).rstrip()


def _continued(line: str, width: int) -> list[str]:
    """Wrap a command into lines of at most `width` columns; only longer words exceed the width."""
    if len(line) <= width:
        return [line]
    inside = len(line) - len(line.removeprefix("example:").lstrip())
    first, *words = _UNBROKEN.findall(line[inside:])
    lines = [line[:inside] + first]
    for word in words:
        if len(lines[-1]) + len(word) + len("  \\") > width:
            lines[-1] += " \\"
            lines.append(" " * (inside + 4) + word)
        else:
            lines[-1] += f" {word}"
    return lines


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError where argparse would exit. Positional arguments may stand
    before, between and after options."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **given}, allow_abbrev=False)
        self._parses = False
        self.add_argument(
            TRACEBACK,
            action="store_true",
            default=argparse.SUPPRESS,
            help="print the traceback above an error",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = self._with_new_names(sys.argv[1:] if args is None else args)
        if self._parses or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._parses = True  # methods that are called below call this method again
        try:
            found, left = super().parse_known_args(args, copy.copy(namespace))
            if left:
                found, left = self.parse_known_intermixed_args(args, namespace)
            return found, left
        finally:
            self._parses = False

    def _with_new_names(self, args: Sequence[str]) -> list[str]:
        """Replace old option and command names by new ones. Print a line on stderr for each."""
        found, lines = with_new_command(args, subcommands(self))
        if self._subparsers is None:
            found, lines = with_new_options(args, self._option_string_actions)
        for line in lines:
            print(f"megapipe: {line}", file=sys.stderr)
        return found

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help shows the options")


class CommandModule(Protocol):
    """A module that defines a command. Its docstring is the description in --help."""

    PURPOSE: str
    """Purpose of the command in a few words, for the list of commands."""

    def add(self, parser: Parser) -> None:
        """Add the command's arguments to its parser."""

    def run(self, given: argparse.Namespace) -> None:
        """Run the command. Raises :class:`MegapipeError`."""


def parser_of(commands: Mapping[str, CommandModule], *, description: str, epilog: str) -> Parser:
    """Return the parser of `commands`, which maps command names to modules. Parsed arguments get an
    attribute `run`, the function to call with them."""
    top = Parser(description=description, epilog=epilog)
    added = top.add_subparsers(metavar="COMMAND", required=True)
    for name, module in commands.items():
        command = added.add_parser(
            name,
            help=module.PURPOSE,
            description=module.__doc__,
        )
        module.add(command)
        command.set_defaults(run=module.run)
    return top


def subcommands(parser: argparse.ArgumentParser) -> Mapping[str, Parser]:
    """Return the parsers of the commands of `parser`, by command name."""
    found = [action.choices for action in parser._actions if isinstance(action, Commands)]
    return found[0] if found else {}


def suggest(action: argparse.Action, words: Callable[[], Iterable[str]]) -> None:
    """Set the `words` that shells offer to complete an argument. Other values are valid too."""
    action.suggested = words  # type: ignore[attr-defined]


def suggested(action: argparse.Action) -> Iterable[str]:
    """Return the words that shells offer for an argument in addition to its choices."""
    words: Callable[[], Iterable[str]] = getattr(action, "suggested", tuple)
    return words()


@contextlib.contextmanager
def quiet_interrupts() -> Iterator[None]:
    """End the process with just an exit code at Ctrl-C, and with one line on an error. Use this
    around a whole program, because imports take seconds and can be interrupted too."""
    try:
        try:
            yield
        except FileNotFoundError:  # of a temporary file, or raised by torch, which loads it
            check_temporary_folder()
            raise
    except MegapipeError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def begin_program() -> None:
    """Set the umask and make garbage collections rare. Call this before slow imports."""
    set_private_umask()
    reduce_gc()


def set_private_umask() -> None:
    """Add 0o002 to the umask: files that this process creates are not writable for all users."""
    os.umask(os.umask(0o077) | 0o002)


def reduce_gc() -> None:
    """Run the garbage collector less often, and not at exit. Otherwise torch's objects, which are
    never freed, would cost each process 0.5 to 1 s of CPU time."""
    gc.set_threshold(50_000, 20, 100)
    atexit.register(gc.freeze)


def escape_unencodable_output() -> None:
    """Make stdout escape characters that its encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def fresh_line(stream: TextIO | None) -> str:
    """Return the escape codes that erase the current line of a terminal, on which a progress bar
    may be shown; "" if `stream` is not a terminal."""
    erases = os.environ.get("TERM", "dumb") not in ("dumb", "unknown") and is_terminal(stream)
    return "\r\x1b[2K" if erases else ""


@contextlib.contextmanager
def phase(what: str, *, in_logs: bool = False) -> Iterator[None]:
    """Print `what` on stderr before the body runs. On a terminal the line is erased after the body.
    If stderr is not a terminal, the line is printed only with `in_logs`, for bodies that take many
    seconds."""
    erases = fresh_line(sys.stderr)
    if is_terminal(sys.stderr) or in_logs:
        end = "\r" if erases else "\n"  # lines printed in the body overwrite it
        _write(f"{erases}megapipe: {what} ...{end}")
    try:
        yield
    finally:
        _write(erases)


def _write(text: str) -> None:
    if text and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # the stream may be closed
            print(text, end="", file=sys.stderr, flush=True)


def check_temporary_folder() -> None:
    """Raise :class:`LaunchError` unless torch has a usable folder for temporary files."""
    if (problem := temporary_folder_problem()) is not None:
        raise LaunchError(problem)


def load_torch() -> None:
    """Import torch, which takes seconds, and print a line before the import. Raises
    :class:`LaunchError` if no folder for temporary files is usable."""
    if "torch" not in sys.modules:
        check_temporary_folder()
        with phase("loading torch"):
            import torch  # noqa: F401


def print_error(error: MegapipeError, *, trace: bool = False) -> None:
    """Print an error as one line, and with `trace` its traceback above the line. The line for a
    requested stop or an interrupt does not contain "error"."""
    if trace:
        error.__suppress_context__ = False
        show_trace(error)
    asked = isinstance(error, (Preempted, Interrupted))
    begin = "megapipe: " if asked else "megapipe: error: "
    with contextlib.suppress(OSError, ValueError):
        line = f"{fresh_line(sys.stderr)}{begin}{' '.join(str(error).split())}"
        print(line, file=sys.stderr, flush=True)


def show_trace(error: BaseException) -> None:
    """Print the traceback of an exception, without the secrets of URLs."""
    text = without_secrets("".join(traceback.format_exception(error)).rstrip())
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def run_command(parser: Parser, argv: Sequence[str], **more: Any) -> int:
    """Run the command that `argv` names, with `more` as further arguments; return the exit code."""
    begin_program()
    escape_unencodable_output()
    try:
        given: argparse.Namespace = parser.parse_args(argv)
        vars(given).update(more)
        given.run(given)
        sys.stdout.flush()
    except MegapipeError as error:
        print_error(error, trace=TRACEBACK in argv)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed the pipe
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
