"""Command lines and configuration files that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

from tests.parity.bad_folder import LONG, text
from tests.parity.bad_input.case import Bad, all_of, made, mode

CANARY = "!!python/object/apply:os.system ['touch canary']"
"""YAML that a careless reader would execute."""


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "bad.yaml")


COMMAND_LINES = [
    Bad("an unknown option", "--foo", 2, ("unknown option --foo", "usage: train.py")),
    Bad("a key as an option", "--model.layers=3", 2, ("write model.layers=3",)),
    Bad("a key without a value", "parallel.tp", 2,
        ("parallel.tp has no value; write parallel.tp=",)),
    Bad("a section with a value", "model=3", 2, ("model is a section; write model.KEY",)),
    Bad("a plan and times at once", "--dry-run --time-slices", 2, ("expected one of them",)),
    Bad("rows of experts without a plan", "--imbalance 2", 2, ("--imbalance needs --dry-run",)),
    Bad("no number of rows", "--dry-run --imbalance 0.9", 2, ("0.9: expected a number >= 1",)),
    Bad("rows without experts", "--dry-run --imbalance 2", 2, ("model.moe.num_experts=null",)),
    Bad("GPUs without a plan", "--gpus 4", 2, ("--gpus needs --dry-run",)),
    Bad("JSON without a plan", "--json", 2, ("--json needs --dry-run",)),
    Bad("no number of GPUs", "--dry-run --gpus", 2, ("--gpus without a value: expected a whole",)),
    Bad("no GPUs", "--dry-run --gpus 0", 2, ("plan.gpus=0: expected a whole number >= 1",)),
    Bad("an unknown device", "--dry-run --device TPU", 2, ("plan.device=TPU is not known",)),
    Bad("help on nothing", "--help modell", 2, ("--help modell: no such section", "model?")),
    Bad("two files", "one.yaml two.yaml", 2, ("one.yaml and two.yaml: expected one",),
        all_of(text("one.yaml", ""), text("two.yaml", ""))),
    Bad("a value that is cut off", "model.layers=[1", 2, ("model.layers=[1: not valid YAML",)),
    Bad("an option with a line break", ("--a\nb",), 2, ("unknown option", "usage: train.py")),
    Bad("a value with a NUL", ('data.source="a\\0b"',), 2, ("data.source", "text without a NUL")),
    Bad("a value with a tag", (f"data.source={CANARY}",), 2, ("data.source=", "the tag")),
    Bad("several mistakes", "model.hidden=a model.heads=b", 2, ("model.hidden=a", "(and 1 more)")),
]  # fmt: skip
FILES = [
    Bad("no such file", "quickstrat", 2, ("quickstrat: no such file; did you mean quickstart?",)),
    Bad("no such file in a folder", "gone/c.yaml", 2,
        ("gone/c.yaml: no such file; expected a configuration in YAML, or one of", "quickstart",)),
    Bad("a file's name is too long", f"{LONG}.yaml", 2,
        ("nnn", "cannot be read: File name too long")),
    Bad("the file is a folder", "bad.yaml", 2,
        ("bad.yaml: is not a file; expected a configuration in YAML",), made("bad.yaml")),
    Bad("the file is a pipe", "bad.yaml", 2, ("bad.yaml: is not a file; expected",), pipe),
    Bad("the file must not be read", "bad.yaml", 2,
        ("bad.yaml: cannot be read: Permission denied",),
        all_of(text("bad.yaml", "log: {every: 2}"), mode("bad.yaml", 0)), privileged=False),
    Bad("the file is not UTF-8", "bad.yaml", 2, ("bad.yaml:2: not UTF-8 text",),
        text("bad.yaml", b"log:\n  every: caf\xe9\n")),
    Bad("the file is binary", "bad.yaml", 2, ("bad.yaml:1: the character",),
        text("bad.yaml", b"\x7fELF\0\0")),
    Bad("the file is huge", "bad.yaml", 2, ("bad.yaml: larger than 1048576 bytes",),
        text("bad.yaml", "#" * (1 << 21))),
    Bad("the file is no mapping", "bad.yaml", 2, ("bad.yaml:1: expected sections with keys",),
        text("bad.yaml", "- model\n- data\n")),
    Bad("a tag that would run a command", "bad.yaml", 2, ("bad.yaml:2: the tag", "plain value"),
        text("bad.yaml", f"log:\n  every: {CANARY}\n")),
    Bad("an anchor", "bad.yaml", 2, ("bad.yaml:1: anchors and aliases are not allowed",),
        text("bad.yaml", "log: &a {every: 1}\nrun: *a\n")),
    Bad("a bomb of aliases", "bad.yaml", 2, ("bad.yaml:1: anchors and aliases",),
        text("bad.yaml", "a: &a [x]\n" + "".join(
            f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)))),
    Bad("a key twice", "bad.yaml", 2, ("bad.yaml:3: data.source is given twice, first in line 2",),
        text("bad.yaml", "data:\n  source: a\n  source: b\n")),
    Bad("not a number", "bad.yaml", 2, ("bad.yaml:2: .nan is not a finite number",),
        text("bad.yaml", "optimizer:\n  lr: .nan\n")),
    Bad("a number beyond all", "bad.yaml", 2, ("bad.yaml:2: 1e400 is not a finite number",),
        text("bad.yaml", "optimizer:\n  lr: 1e400\n")),
    Bad("an octal number", "bad.yaml", 2, ("bad.yaml:2: log.every=", "expected a whole number"),
        text("bad.yaml", "log:\n  every: 010\n")),
    Bad("deep nesting in the file", "bad.yaml", 2, ("bad.yaml:1: nested deeper",),
        text("bad.yaml", "log: " + "[" * 20000)),
    Bad("a tabulator", "bad.yaml", 2, ("bad.yaml:2: not valid YAML",),
        text("bad.yaml", "log:\n\tevery: 1\n")),
    Bad("an unknown section", "bad.yaml", 2, ("bad.yaml:2: optimiser.lr=1: unknown key",
        "did you mean optimizer.lr?"), text("bad.yaml", "optimiser:\n  lr: 1\n")),
    Bad("a wrong type", "bad.yaml", 2, ("bad.yaml:2: log.every='1': expected a whole number",),
        text("bad.yaml", "log:\n  every: '1'\n")),
    Bad("several documents", "bad.yaml", 2, ("bad.yaml:2:", "single document"),
        text("bad.yaml", "log: {every: 1}\n---\nrun: {seed: 1}\n")),
]  # fmt: skip
