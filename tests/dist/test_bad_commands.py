"""Bad input of the commands for data and models: one line, a documented exit code, nothing left
behind, by processes of their own.

Scripts that load no torch are run by interpreters of their own, as are some cases of the others,
one of each command at least. The rest runs as ``python SCRIPT ...`` does but for the start of the
interpreter, which a server of forks has done once for all (``tests/parity/launches.py``).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megapipe.convert import commands as convert
from megapipe.data import commands as prepare_data
from megapipe.evaluate import commands as evaluate
from tests.parity.bad_commands import (
    CONVERT,
    DATA,
    EVALUATE,
    OF_TOKEN_FILES,
    Bad,
    every,
)
from tests.parity.bad_folder import make_folder
from tests.parity.launches import fork_script, run_script
from tests.parity.tiers import in_parts

CASES = list(every())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "made"
    make_folder(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "here"))


@in_parts("bad", OF_TOKEN_FILES, default=8, full=3, ids=lambda bad: bad.name)
def test_of_token_files(bad: Bad, folder: Path) -> None:
    bad.prepare(folder)
    before = names_in(folder)
    ended = run_script(folder, bad.script, *bad.arguments())
    ended.assert_one_line(bad.code, *bad.words)
    assert names_in(folder) == before


@in_parts(
    "bad",
    [bad for bad in CASES if bad not in OF_TOKEN_FILES],
    full=6,
    ids=lambda bad: bad.name,
)
def test_of_texts_and_models(bad: Bad, folder: Path) -> None:
    bad.prepare(folder)
    before = names_in(folder)
    launch = run_script if bad.alone else fork_script
    launch(folder, bad.script, *bad.arguments()).assert_one_line(bad.code, *bad.words)
    assert names_in(folder) == before


def test_there_is_a_case_of_each_command() -> None:
    assert len({bad.name for bad in CASES}) == len(CASES) >= 80
    assert len([bad for bad in CASES if bad.alone]) >= 60
    for script, commands in (
        (DATA, prepare_data.COMMANDS),
        (CONVERT, convert.COMMANDS),
        (EVALUATE, evaluate.COMMANDS),
    ):
        alone = {bad.command for bad in CASES if bad.alone and bad.script == script}
        assert alone == commands.keys()


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder, without a cache's."""
    return {path.name for path in folder.iterdir()} - {"c"}
