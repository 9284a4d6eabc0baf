"""Files of killed and living processes that join token files."""

import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.data.commands import main
from tests.unit.data.data_cases import write_documents


def test_what_a_killed_process_was_writing_is_removed_by_the_next_and_a_living_one_s_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_documents(Path("x"), [[[1, 2]]])
    code = (
        "from pathlib import Path; from megapipe.data.tokens.atomic_files import fresh\n"
        "with fresh(Path('new[1]')) as working:\n"
        "    working.with_name(working.name + '.bin').write_bytes(b'12')\n"
        "    print('writing', flush=True); input()"
    )
    Path(".new[1].abc.bin").touch()
    Path(f".new[1].{'0' * 8}-1-1.bin").touch()
    others = {path.name for path in tmp_path.iterdir()}
    run = [sys.executable, "-c", code]
    with (
        subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as living,
        subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed,
    ):
        for process in (living, killed):
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
        killed.kill()
        killed.wait()
        left = {path.name for path in tmp_path.iterdir()} - others
        assert len(left) == 2
        assert main(["merge", "new[1]", "x", "x"]) == 0
        (still,) = (
            {path.name for path in tmp_path.iterdir()} - others - {"new[1].bin", "new[1].idx"}
        )
        assert f"-{living.pid}-" in still
        living.kill()
    Path("new[1].bin").unlink()
    Path("new[1].idx").unlink()
    assert main(["merge", "new[1]", "x"]) == 0
    assert {path.name for path in tmp_path.iterdir()} - others == {"new[1].bin", "new[1].idx"}
