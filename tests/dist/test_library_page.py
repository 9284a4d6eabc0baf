"""The blocks of docs/library.md and the cells of docs/library.ipynb run in order, by themselves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megapipe

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/library.md").read_text(encoding="utf-8")
NOTEBOOK = json.loads((ROOT / "docs/library.ipynb").read_text(encoding="utf-8"))
RUNNER = """
import json, sys
for number, source in enumerate(json.load(sys.stdin)):
    exec(compile(source, f"cell {number}", "exec"), globals())
"""
"""Runs cells as a notebook does: in ``__main__``, which has no file."""


def run(cells: list[str], folder: Path) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        cwd=folder,
        env=environ,
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert {language for language, _ in fenced} == {"python"}
    assert len(fenced) >= 6
    run([source for _, source in fenced], tmp_path)
    assert (tmp_path / "runs/counting/copies/step-00000005").is_dir()


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    out = run(["".join(cell["source"]) for cell in cells], tmp_path)
    assert re.search(r"^0 0F0 0F1 ", out, re.MULTILINE)
    assert re.search(r"^loss \d\.\d+ -> \d\.\d+$", out, re.MULTILINE)


def test_the_page_names_what_the_package_offers() -> None:
    named = re.findall(r"^\| `megapipe\.(\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(named) == sorted(megapipe.__all__)
