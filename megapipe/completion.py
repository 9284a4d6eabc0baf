"""Completion in a shell: ``source <(megapipe completion bash)``, or zsh.

Commands, and for training presets, keys, options, and the values of keys that have a few.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from megapipe import presets
from megapipe.cli import IMBALANCE, OPTIONS
from megapipe.command_line import Parser, run_command
from megapipe.keys import KEYS, expected
from megapipe.schedule.generators import names

SCRIPT = """\
_megapipe() {{
  local words=${{COMP_LINE:0:COMP_POINT}} current
  words=${{words//\\\\\\"/}}
  current=${{words##*[[:space:]]}}
  case $words in
    *[[:space:]]train[[:space:]]*)
      case $current in
{values}
        *=*) COMPREPLY=($(compgen -f -- "${{current#*=}}")) ;;
        *)
          COMPREPLY=($(compgen -W '{train}' -- "$current") $(compgen -f -X '!*.yaml' -- "$current"))
          [[ ${{#COMPREPLY[@]}} != 1 || ${{COMPREPLY[0]}} != *= ]] || compopt -o nospace 2>/dev/null
          ;;
      esac
      ;;
    *[[:space:]]*[[:space:]]*) COMPREPLY=($(compgen -f -- "$current")) ;;
    *) COMPREPLY=($(compgen -W '{commands}' -- "$current")) ;;
  esac
}}
complete -o bashdefault -F _megapipe megapipe
"""
ZSH = "autoload -U compinit bashcompinit && compinit && bashcompinit\n"
"""zsh runs functions that are written for bash."""


def parser() -> Parser:
    """The parser of the command."""
    top = Parser(description="Completion of commands, presets and keys: source what it prints.")
    top.add_argument("shell", choices=("bash", "zsh"))
    top.set_defaults(run=_show)
    return top


def main(argv: Sequence[str]) -> int:
    """Print the script of the shell that `argv` names; returns the exit code."""
    return run_command(parser(), argv)


def script(shell: str, commands: Sequence[str]) -> str:
    """The functions that complete `commands` in a shell."""
    values = "\n".join(
        f"        {key}=*) COMPREPLY=($(compgen -W '{' '.join(few)}' -- \"${{current#*=}}\")) ;;"
        for key, few in _values()
    )
    train = (*presets.names(), *(f"{key}=" for key in KEYS), *OPTIONS, IMBALANCE, "--help")
    text = SCRIPT.format(values=values, train=" ".join(train), commands=" ".join(commands))
    return (ZSH if shell == "zsh" else "") + text


def _values() -> Iterator[tuple[str, list[str]]]:
    """The keys that take words of a list, and these."""
    yield "pipeline.schedule", ["auto", *names()]
    for key, info in KEYS.items():
        words = expected(info)
        if words == "true or false":
            yield key, ["true", "false"]
        elif words.startswith("one of "):
            yield key, words.removeprefix("one of ").partition(", or ")[0].split(", ")


def _show(given: argparse.Namespace) -> None:
    from megapipe.console import COMMANDS

    print(script(given.shell, list(COMMANDS)), end="")
