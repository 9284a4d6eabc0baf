"""Programs with commands share this: errors in one line, and exit codes."""

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
from megapipe.util.paths import temporary_folder_problem
from megapipe.words import is_terminal, without_secrets

TRACEBACK = "--traceback"
"""The option by which an error is shown with where it arose."""

INTERRUPTED = Interrupted.exit_code
"""The exit code after Ctrl-C, as shells have it."""

Commands = argparse._SubParsersAction  # the only name that argparse has for it


_UNBROKEN = re.compile(r"""(?:-\S+ (?=[^-]))?(?:"[^"]*"|'[^']*'|\S)+""")
"""A word of a command, with quotes as one and an option with its value."""
_LINE = re.compile(r"\s|examples?:")


class HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs to the width of the terminal. Lines that are indented or begin with
    "example:" stay lines: those that are wider are commands, and go on behind a backslash."""

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
    """Return the lines of a command, of at most `width` columns unless a single word is longer."""
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
    """A parser that raises ConfigError where argparse would exit. Its command has names and keys
    before, between and after options."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **given}, allow_abbrev=False)
        self._parses = False
        self.add_argument(
            TRACEBACK,
            action="store_true",
            default=argparse.SUPPRESS,
            help="show above an error where in the code it arose",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._parses or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._parses = True  # what is called below calls this method again
        try:
            found, left = super().parse_known_args(args, copy.copy(namespace))
            if left:
                found, left = self.parse_known_intermixed_args(args, namespace)
            return found, left
        finally:
            self._parses = False

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help shows what is possible")


class CommandModule(Protocol):
    """A file with a command; its docstring is the description."""

    PURPOSE: str
    """In a few words, for the list of commands."""

    def add(self, parser: Parser) -> None:
        """Add what the command takes."""

    def run(self, given: argparse.Namespace) -> None:
        """Do it. Raises a :class:`MegapipeError`."""


def parser_of(commands: Mapping[str, CommandModule], *, description: str, epilog: str) -> Parser:
    """The parser of commands, each a :class:`CommandModule` by its name; it sets `run`, a function
    of the parsed arguments."""
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
    """Return the parsers of a parser's commands, by their names."""
    found = [action.choices for action in parser._actions if isinstance(action, Commands)]
    return found[0] if found else {}


def suggest(action: argparse.Action, words: Callable[[], Iterable[str]]) -> None:
    """Have shells complete an argument by `words`. It may take others too."""
    action.suggested = words  # type: ignore[attr-defined]


def suggested(action: argparse.Action) -> Iterable[str]:
    """Return the words by which shells complete an argument, besides its choices."""
    words: Callable[[], Iterable[str]] = getattr(action, "suggested", tuple)
    return words()


@contextlib.contextmanager
def quiet_interrupts() -> Iterator[None]:
    """End the process at Ctrl-C with nothing but the exit code, and on an error with a line: around
    all of a program, as what it loads takes seconds."""
    try:
        try:
            yield
        except FileNotFoundError:  # a temporary file's, or of torch, which code of others loads
            check_temporary_folder()
            raise
    except MegapipeError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def begin_program() -> None:
    """Set up a process, before it imports what takes time."""
    set_private_umask()
    reduce_gc()


def set_private_umask() -> None:
    """Have no file that this process makes be written to by every user, whatever its umask was."""
    os.umask(os.umask(0o077) | 0o002)


def reduce_gc() -> None:
    """Let Python look for garbage less often, and not at its end: the objects of torch alone, which
    all stay, would take each process half a second to a second of processor time."""
    gc.set_threshold(50_000, 20, 100)
    atexit.register(gc.freeze)


def escape_unencodable_output() -> None:
    """Let stdout write characters that its encoding lacks: as escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def fresh_line(stream: TextIO | None) -> str:
    """The codes that erase the line of a terminal, where a bar with the progress may stand; "" for
    what is none."""
    erases = os.environ.get("TERM", "dumb") not in ("dumb", "unknown") and is_terminal(stream)
    return "\r\x1b[2K" if erases else ""


@contextlib.contextmanager
def phase(what: str, *, in_logs: bool = False) -> Iterator[None]:
    """Say on stderr what is done within, which takes seconds, before it begins: on a terminal,
    where the line goes away when it is over; with `in_logs`, for what takes many, elsewhere too."""
    erases = fresh_line(sys.stderr)
    if is_terminal(sys.stderr) or in_logs:
        end = "\r" if erases else "\n"  # lines from within are written over it
        _write(f"{erases}megapipe: {what} ...{end}")
    try:
        yield
    finally:
        _write(erases)


def _write(text: str) -> None:
    if text and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            print(text, end="", file=sys.stderr, flush=True)


def check_temporary_folder() -> None:
    """Raise :class:`LaunchError` where torch could not be loaded, as it needs such a folder."""
    if (problem := temporary_folder_problem()) is not None:
        raise LaunchError(problem)


def load_torch() -> None:
    """Import torch, which takes seconds, and say so before. Raises :class:`LaunchError` where there
    is no folder for temporary files."""
    if "torch" not in sys.modules:
        check_temporary_folder()
        with phase("loading torch"):
            import torch  # noqa: F401


def print_error(error: MegapipeError, *, trace: bool = False) -> None:
    """Print an error as one line; with `trace`, below where it arose and what led to it. A stop
    or an interrupt that was asked for is none."""
    if trace:
        error.__suppress_context__ = False
        show_trace(error)
    asked = isinstance(error, (Preempted, Interrupted))
    begin = "megapipe: " if asked else "megapipe: error: "
    with contextlib.suppress(OSError, ValueError):
        line = f"{fresh_line(sys.stderr)}{begin}{' '.join(str(error).split())}"
        print(line, file=sys.stderr, flush=True)


def show_trace(error: BaseException) -> None:
    """Print where an exception arose and what led to it, without the secrets of URLs."""
    text = without_secrets("".join(traceback.format_exception(error)).rstrip())
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def run_command(parser: Parser, argv: Sequence[str], **more: Any) -> int:
    """Call the `run` that the parsed arguments have, with them and `more`; the exit code."""
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
    except BrokenPipeError:  # the reader of our output has what it wanted
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
