"""Completion in a shell: ``source <(megapipe completion bash)``, or zsh.

What it prints knows the commands alone. The words of a command (its commands, options, the values
of those that have a few; for training presets and keys) are asked for when Tab first needs them,
by ``megapipe completion bash COMMAND``, and are those of its parser.
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
"""Functions for the shell. `current` is the word before the cursor, of an assignment what is behind
the sign; `previous` is the word before it, or the key or option that it is assigned to.
`_megapipe_reply WORDS [-f [PATTERN]]` answers with words and files, without those of a pattern."""
ZSH = "autoload -U compinit bashcompinit && compinit && bashcompinit\n"
"""zsh runs functions that are written for bash."""


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
        help="print its words alone, which the whole asks for when it needs them",
    )
    top.set_defaults(run=_show)
    return top


def main(argv: Sequence[str]) -> int:
    """Print the script of the shell that `argv` names; returns the exit code."""
    return run_command(parser(), argv)


def script(shell: str, commands: Sequence[str]) -> str:
    """The functions that complete `commands` in a shell."""
    text = SCRIPT.format(
        commands=" ".join(commands),
        pattern="|".join(commands),
        program=shlex.join([sys.executable, "-m", "megapipe"]),
        kind=shell,
    )
    return (ZSH if shell == "zsh" else "") + text


def words(command: str) -> str:
    """Return the function that completes the words behind a command."""
    from megapipe.console import COMMANDS

    lines = [f"_megapipe_{command.replace('-', '_')}() {{"]
    if command == "train":
        lines += _training()
    else:
        lines += _of_parser(import_module(COMMANDS[command][0]).parser())
    return "\n".join([*lines, "}", ""])


def _of_parser(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Return the statements for what stands behind a command, or the command of a command."""
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
        elif action.nargs != 0:  # it has a value
            reply = _reply(few, files=not action.choices)
            replies |= dict.fromkeys(action.option_strings, reply)
    yield from _choice(replies, here)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings]


def _training() -> Iterator[str]:
    """Return the statements for what stands behind `train`, whose parser is none of argparse."""
    from megapipe.cli import IMBALANCE, OPTIONS, possible_words
    from megapipe.config.keys import KEYS, SECTIONS

    topics = _reply(["all", *SECTIONS, *KEYS])
    replies = {"--help": topics, "-h": topics, IMBALANCE: _reply([])}
    yield from _choice(replies, [*possible_words(), *OPTIONS, IMBALANCE, "--help"])


def _choice(replies: Mapping[str, str], here: Sequence[str]) -> Iterator[str]:
    """Yield the statements that answer by the option or key before the cursor, or else with the
    words that may stand `here`, and files."""
    takes_keys = any(word.endswith("=") for word in here)
    yield "  case $previous in"
    for name, reply in {**replies, **(_of_keys() if takes_keys else {})}.items():
        yield f"    {name}) {reply} ;;"
    yield f"    *) if [[ $assigned ]]; then {_reply([], files=True)}"
    pattern = " '!*.yaml'" if takes_keys else ""
    yield f"      else {_reply(here, files=True)}{pattern}; fi ;;"
    yield "  esac"


def _reply(words: Iterable[str], *, files: bool = False) -> str:
    """Return the statement that answers with words, and with files if they count."""
    return f"_megapipe_reply '{' '.join(words)}'{' -f' if files else ''}"


def _of_keys() -> dict[str, str]:
    """Return the keys that take one of a few words, each with the answer that has these."""
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
