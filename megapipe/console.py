"""The console command: ``megapipe train quickstart``, ``megapipe schedule list``, from any folder.

``megapipe NAME`` does the same as the script with that name (train.py, scripts/schedule.py, ...):
both call `main` of one module, which is loaded when the command is used.
"""

import sys
from difflib import get_close_matches
from importlib import import_module

from megapipe.command_line import load_torch, quiet_interrupts
from megapipe.version import __version__

COMMANDS = {
    "train": ("megapipe.train.main", "train a model, or show its plan (--dry-run)"),
    "generate": ("megapipe.generate.command", "generate text with a model"),
    "evaluate": (
        "megapipe.evaluate.commands",
        "measure a model: perplexity, multiple choice, lm_eval",
    ),
    "plan": ("megapipe.plan.search.command", "find the fastest layout for a number of devices"),
    "schedule": ("megapipe.schedule.commands", "list, draw, time, compare and search schedules"),
    "context": ("megapipe.plan.commands", "context parallelism: compare costs, draw rounds"),
    "experts": (
        "megapipe.plan.moe.commands",
        "MoE: simulate dispatch, show routing, place experts",
    ),
    "prepare-data": (
        "megapipe.data.commands",
        "prepare, inspect, verify, merge, split token files",
    ),
    "convert": ("megapipe.convert.commands", "convert models to Hugging Face format and back"),
    "checkpoint": (
        "megapipe.checkpoint.commands",
        "list, verify, compare, remove checkpoints",
    ),
    "summary": ("megapipe.observe.summary", "summarize a finished run"),
    "config": ("megapipe.config.commands", "replace old key names in configuration files"),
    "doctor": ("megapipe.launch.doctor", "check this machine: versions, devices, limits"),
    "launch": ("megapipe.launch.launcher", "start the processes of a job on this node"),
    "completion": ("megapipe.completion", "print shell completion for bash or zsh"),
}
"""Module and purpose of each command. The module's function main(argv) returns the exit code. Every
module except the one of ``train`` also has a function parser()."""
LOAD_TORCH = ("generate", "evaluate", "convert", "checkpoint", "summary")
"""Commands whose modules load torch."""


def main() -> int:
    """Run the command that the program's arguments begin with. Return the exit code."""
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
    sys.argv = [f"megapipe {name}", *rest]  # argparse reads the program's name from it
    with quiet_interrupts():
        if name in LOAD_TORCH:
            load_torch()
        return import_module(COMMANDS[name][0]).main(rest)


def usage() -> str:
    """Return the list of commands, one line each."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: megapipe COMMAND ...",
            "",
            *(f"  {name:{width}}  {purpose}" for name, (_, purpose) in COMMANDS.items()),
            "",
            "megapipe COMMAND --help explains a command, megapipe --version prints the",
            "version. Several processes:",
            "  megapipe launch --nproc 8 -m megapipe train quickstart",
            "",
        ]
    )
