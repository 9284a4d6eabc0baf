"""The packages that only tests of `--full` need: other systems, which tests/external compares with,
and a constraint solver."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from tests.running import processes

OTHER_SYSTEMS = (
    *("megatron-core==0.16.1", "peft==0.21.2", "lm_eval==0.4.13"),
    # what the last two need to be imported
    *("accelerate==1.15.0", "colorama==0.4.6", "lxml==6.0.2", "portalocker==4.4.2"),
    *("sacrebleu==2.5.1", "tabulate==0.10.0"),
)
OLDER_TRANSFORMERS = ("transformers==4.57.1", "huggingface-hub==0.36.2", "tokenizers==0.22.2")
"""The last version before 5, in :func:`older_transformers`, with what it needs of other versions
than the environment has."""
INSTALL = ("--disable-pip-version-check", "install", "-q")


def older_transformers() -> Path:
    """Return the folder that a process puts first on its path to import them."""
    return Path(sys.prefix) / "older-transformers"


def install_other_systems() -> None:
    """Install all of them, or say that it cannot be done."""
    done = processes.run("pip", *INSTALL, "--no-deps", *OTHER_SYSTEMS) == 0
    folder = older_transformers()
    if not folder.is_dir():
        target = ("--target", str(folder))
        done &= processes.run("pip", *INSTALL, "--no-deps", *target, *OLDER_TRANSFORMERS) == 0
    if not done:
        left_out = "other systems cannot be installed: most of tests/external is left out"
        print(left_out, file=sys.stderr, flush=True)


def install_solver() -> None:
    """Install the extra `exact`, or say that it cannot be done."""
    project = tomllib.loads((processes.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = project["project"]["optional-dependencies"]["exact"]
    if processes.run("pip", *INSTALL, "-c", "constraints.txt", *wanted) != 0:
        left_out = "OR-Tools cannot be installed: comparisons with exact searches are left out"
        print(left_out, file=sys.stderr, flush=True)
