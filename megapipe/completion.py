"""Completion in a shell: ``source <(megapipe completion bash)``, or zsh.

The printed script knows only the names of the commands. When Tab first needs the words of a
command, the script runs ``megapipe completion bash COMMAND``. Those words are the subcommands, the
options and their choices in the command's parser, and for training the presets and keys.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module

from megapipe.command_line import Parser, run_command, subcommands, suggested

SCRIPT = """\
_megapipe() {{
  local line=${{COMP_LINE:0:COMP_POINT}} current before command inner previous assigned= rest
  line=${{line//\\\\\\"/}}
  line=${{line#*[[:space:]]}}
  line=${{line##*-m[[:space:]]megapipe[[:space:]]}}
  current=${{line##*[[:space:]]}}
  before=${{line%"$current"}}
  read -r command inner rest <<< "$before"
  previous=${{before%"${{before##*[![:space:]]}}"}}
  previous=${{previous##*[[:space:]]}}
  if [[ $current == *=* ]]; then
    assigned=1 previous=${{current%%=*}} current=${{current#*=}}
  fi
  case $command in
    '') _megapipe_reply '{commands} --help --version' ;;
    {pattern})
      rest=_megapipe_${{command//-/_}}
      {{
        type "$rest" > /dev/null || eval "$({program} completion {kind} "$command")"
        "$rest"
      }} 2> /dev/null
      ;;
    *) _megapipe_reply '' -f ;;
  esac
}}
_megapipe_reply() {{
  COMPREPLY=($(compgen -W "$1" -- "$current"))
  if [[ $2 && ( $assigned || $current != -* ) ]]; then
    local IFS=$'\\n'
    [[ ${{#COMPREPLY[@]}} != 0 ]] || compopt -o filenames 2> /dev/null
    COMPREPLY+=($(compgen -f -X "$3" -- "$current"))
  fi
  [[ ${{#COMPREPLY[@]}} != 1 || ${{COMPREPLY[0]}} != *= ]] || compopt -o nospace 2> /dev/null
}}
complete -o bashdefault -F _megapipe megapipe
"""
"""Functions for the shell. `current` is the word before the cursor or, in an assignment, the text
after the equals sign. `previous` is the word before `current`; in an assignment it is the key or
option to the left of the equals sign. `_megapipe_reply WORDS [-f [PATTERN]]` replies with words,
and with -f also with names of files that do not match the pattern."""
ZSH = "autoload -U compinit bashcompinit && compinit && bashcompinit\n"
"""Line that lets zsh run completion functions that are written for bash."""


def parser() -> Parser:
    """Return the parser of the command."""
    from megapipe.console import COMMANDS

    top = Parser(
        description="Completion of commands, options and keys: source what it prints, "
        "source <(megapipe completion bash)."
    )
    top.add_argument("shell", choices=("bash", "zsh"))
    top.add_argument(
        "command",
        nargs="?",
        choices=tuple(COMMANDS),
        metavar="COMMAND",
        help="print only the words of this command, as the completion script does on demand",
    )
    top.set_defaults(run=_show)
    return top


def main(argv: Sequence[str]) -> int:
    """Print the completion script for the shell in `argv`. Return the exit code."""
    return run_command(parser(), argv)


def script(shell: str, commands: Sequence[str]) -> str:
    """Return the shell functions that complete `commands`."""
    text = SCRIPT.format(
        commands=" ".join(commands),
        pattern="|".join(commands),
        program=shlex.join([sys.executable, "-m", "megapipe"]),
        kind=shell,
    )
    return (ZSH if shell == "zsh" else "") + text


def words(command: str) -> str:
    """Return the shell function that completes the words after a command."""
    from megapipe.console import COMMANDS

    lines = [f"_megapipe_{command.replace('-', '_')}() {{"]
    if command == "train":
        lines += _training()
    else:
        lines += _of_parser(import_module(COMMANDS[command][0]).parser())
    return "\n".join([*lines, "}", ""])


def _of_parser(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the statements that complete the words after a command or one of its subcommands."""
    inner = subcommands(parser)
    if inner:
        yield "  case $inner in"
        for name, each in inner.items():
            yield f"    {name})"
            yield from (f"    {line}" for line in _of_parser(each))
            yield "      ;;"
        yield f"    *) {_reply((*inner, *_options(parser)))} ;;"
        yield "  esac"
        return
    replies, here = dict[str, str](), _options(parser)
    for action in parser._actions:
        few = [*map(str, action.choices or ()), *suggested(action)]
        if not action.option_strings:
            here += few
        elif action.nargs != 0:  # the option has a value
            reply = _reply(few, files=not action.choices)
            replies |= dict.fromkeys(action.option_strings, reply)
    yield from _choice(replies, here)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings]


def _training() -> Iterator[str]:
    """Yield the statements that complete the words after `train`, whose parser is not argparse."""
    from megapipe.cli import OPTIONS, VALUE_OPTIONS, possible_words
    from megapipe.config.keys import KEYS, SECTIONS

    topics = _reply(["all", *SECTIONS, *KEYS])
    replies = {"--help": topics, "-h": topics, **dict.fromkeys(VALUE_OPTIONS, _reply([]))}
    yield from _choice(replies, [*possible_words(), *OPTIONS, *VALUE_OPTIONS, "--help"])


def _choice(replies: Mapping[str, str], words: Sequence[str]) -> Iterator[str]:
    """Yield a shell `case` on the option or key before the cursor. `replies` has the statement for
    each option or key with a value; for all others, the shell offers `words` and file names."""
    takes_keys = any(word.endswith("=") for word in words)
    yield "  case $previous in"
    for name, reply in {**replies, **(_of_keys() if takes_keys else {})}.items():
        yield f"    {name}) {reply} ;;"
    yield f"    *) if [[ $assigned ]]; then {_reply([], files=True)}"
    pattern = " '!*.yaml'" if takes_keys else ""
    yield f"      else {_reply(words, files=True)}{pattern}; fi ;;"
    yield "  esac"


def _reply(words: Iterable[str], *, files: bool = False) -> str:
    """Return the statement that replies with `words`, and also with file names if `files`."""
    return f"_megapipe_reply '{' '.join(words)}'{' -f' if files else ''}"


def _of_keys() -> dict[str, str]:
    """Return the reply for each key that takes one of a few values."""
    from megapipe.config.keys import KEYS, few_values
    from megapipe.schedule.generators import names

    found = {key: _reply(few) for key, info in KEYS.items() if (few := few_values(info))}
    return {**found, "pipeline.schedule": _reply(["auto", *names()], files=True)}


def _show(given: argparse.Namespace) -> None:
    from megapipe.console import COMMANDS

    if given.command is None:
        print(script(given.shell, list(COMMANDS)), end="")
    else:
        print(words(given.command), end="")
