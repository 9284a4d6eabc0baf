"""The exit code that the first launcher of a job to end writes for a scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.launch.launcher import write_verdict


@pytest.mark.parametrize("there", [False, True])
def test_the_first_code_stays(there: bool, tmp_path: Path) -> None:
    """The file may be there before, and empty."""
    path = tmp_path / "verdict"
    if there:
        path.touch()
    for code in (2, 143):
        write_verdict(path, code)
    assert path.read_text() == "2\n"


def test_a_file_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_verdict(tmp_path / "no/verdict", 2)
    told = f"megapipe: error: --verdict {tmp_path}/no/verdict: No such file or directory; "
    assert capsys.readouterr().err == f"{told}the exit code is 2\n"
