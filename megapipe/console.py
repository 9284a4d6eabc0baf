"""The console command: ``megapipe train quickstart``, ``megapipe schedule list``, from any folder.

Each command is the script of the same name (train.py, scripts/schedule.py, ...): both call the
`main` of one module, which is loaded when it is asked for.
"""

import sys
from difflib import get_close_matches
from importlib import import_module

from megapipe.command_line import load_torch, quiet_interrupts
from megapipe.version import __version__

COMMANDS = {
    "train": ("megapipe.train.main", "train a model, or show its plan (--dry-run)"),
    "generate": ("megapipe.generate.command", "text from a checkpoint"),
    "evaluate": (
        "megapipe.evaluate.commands",
        "perplexity, multiple choice, tasks of lm_eval",
    ),
    "schedule": ("megapipe.schedule.commands", "list, draw, time, compare and search schedules"),
    "context": ("megapipe.plan.commands", "attention over split positions: costs, drawings"),
    "experts": (
        "megapipe.plan.moe.commands",
        "layers with experts: exchanges, choices, ranks for them",
    ),
    "prepare-data": ("megapipe.data.commands", "texts to token files, and token files to others"),
    "convert": ("megapipe.convert.commands", "models to Hugging Face's form and back"),
    "checkpoint": (
        "megapipe.checkpoint.commands",
        "list, verify, compare, remove checkpoints",
    ),
    "summary": ("megapipe.observe.summary", "how a finished run went"),
    "doctor": ("megapipe.launch.doctor", "what this machine gives a run"),
    "launch": ("megapipe.launch.launcher", "start the processes of a job on this node"),
    "completion": ("megapipe.completion", "commands and keys for a shell's Tab: bash or zsh"),
}
"""The module of each command, whose main(argv) returns the exit code, and what it is for. All but
that of training have a function parser()."""
LOAD_TORCH = ("generate", "evaluate", "convert", "checkpoint", "summary")
"""Commands whose modules load torch."""


def main() -> int:
    """Run the command that the arguments begin with; returns the exit code."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        print(usage(), end="")
        return 0
    if name == "--version":
        print(f"megapipe {__version__}")
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
        print(f"megapipe: error: unknown command {name!a}; {hint}", file=sys.stderr)
        return 2
    sys.argv = [f"megapipe {name}", *rest]  # argparse takes a program's name from here
    with quiet_interrupts():
        if name in LOAD_TORCH:
            load_torch()
        return import_module(COMMANDS[name][0]).main(rest)


def usage() -> str:
    """The commands, one line each."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: megapipe COMMAND ...",
            "",
            *(f"  {name:{width}}  {purpose}" for name, (_, purpose) in COMMANDS.items()),
            "",
            "megapipe COMMAND --help tells what a command takes, megapipe --version which",
            "megapipe this is. Several processes:",
            "  megapipe launch --nproc 8 -m megapipe train quickstart",
            "",
        ]
    )
