"""Deprecated options and subcommands, of version 0.1, which are accepted for one more release."""

from __future__ import annotations

from collections.abc import Collection, Sequence

OPTIONS = {
    "--advance": "--extra-warmup",
    "--copy-gb-s": "--permute-gb-s",
    "--deviate": "--out-of-order",
    "--group": "--microbatch-group-size",
    "--horizon": "--prediction-horizon",
    "--maps": "--pool-size",
    "--memory-limit": "--activation-limit",
    "--pairs": "--chimera-pairs",
    "--replicas": "--ranks-per-stage",
    "--restarts": "--max-restarts",
    "--samples": "--sample-format",
    "--slices": "--sequence-slices",
    "--slots": "--replica-slots",
    "--tokens": "--max-new-tokens",
    "--train-on": "--loss-turns",
    "--weights": "--weight-versions",
    "--workers": "--tokenizer-workers",
}
"""New names of options, by old name. An old name that a command uses for another option stays."""

COMMANDS = {"plan": "rebalance", "choices": "multiple-choice"}
"""New name of each old subcommand."""


def with_new_options(argv: Sequence[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """Replace old option names in the arguments `argv` of a command whose options are now named
    `options`. Return the new arguments, and a line for the user about each old name."""
    found, lines = [], []
    for word in argv:
        name, equals, value = word.partition("=")
        new = OPTIONS.get(name)
        if new is not None and new in options and name not in options:
            lines.append(_line(name, new))
            word = f"{new}{equals}{value}"
        found.append(word)
    return found, lines


def with_new_command(argv: Sequence[str], commands: Collection[str]) -> tuple[list[str], list[str]]:
    """Replace an old subcommand name at the beginning of `argv`; `commands` are the present names.
    Return the new arguments, and a line for the user if there was an old name."""
    new = COMMANDS.get(argv[0]) if argv else None
    if new is None or new not in commands or argv[0] in commands:
        return list(argv), []
    return [new, *argv[1:]], [_line(argv[0], new)]


def _line(old: str, new: str) -> str:
    return f"{old} is called {new}; the old name works for one more release"
