"""Bad input of the commands for data and models: one line, a documented exit code, nothing left
behind, by processes of their own.

Each case runs as ``python SCRIPT ...`` does but for the start of the interpreter, which a server of
forks has done once for all (``tests/parity/launches.py``). About one case a command is run by an
interpreter of its own too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megapipe.convert import commands as convert
from megapipe.data import commands as prepare_data
from megapipe.evaluate import commands as evaluate
from tests.parity.bad_commands import CONVERT, DATA, EVALUATE, Bad, every
from tests.parity.bad_folder import make_folder
from tests.parity.launches import fork_script, run_script

pytestmark = pytest.mark.full

CASES = list(every())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "made"
    make_folder(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "here"))


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
def test_one_line_and_a_code(bad: Bad, folder: Path) -> None:
    bad.prepare(folder)
    given = bad.arguments()
    before = names_in(folder)
    fork_script(folder, bad.script, *given).assert_one_line(bad.code, *bad.words)
    assert names_in(folder) == before


@pytest.mark.parametrize("bad", [bad for bad in CASES if bad.alone], ids=lambda bad: bad.name)
def test_by_an_interpreter_of_its_own(bad: Bad, folder: Path) -> None:
    bad.prepare(folder)
    run_script(folder, bad.script, *bad.arguments()).assert_one_line(bad.code, *bad.words)


def test_there_is_a_case_of_each_command() -> None:
    assert len({bad.name for bad in CASES}) == len(CASES) >= 80
    assert len([bad for bad in CASES if bad.alone]) >= 11
    for script, commands in (
        (DATA, prepare_data.COMMANDS),
        (CONVERT, convert.COMMANDS),
        (EVALUATE, evaluate.COMMANDS),
    ):
        tried = {command_of(bad) for bad in CASES if bad.script == script}
        assert set(commands) <= tried, set(commands) - tried


def command_of(bad: Bad) -> str:
    """The command that is named, or the one that options alone stand for."""
    first = bad.arguments()[0]
    return "tokenize" if bad.script == DATA and first.startswith("--") else first


def names_in(folder: Path) -> set[str]:
    """What is there, but for a cache."""
    return {path.name for path in folder.iterdir()} - {"c"}
