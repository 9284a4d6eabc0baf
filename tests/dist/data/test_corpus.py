"""Readers of a corpus as a process has them: what they say, and where they write."""

import os
import subprocess
import sys
from pathlib import Path

from megapipe.data import corpus
from tests.unit.data.data_cases import TEXTS, rows, write_jsonl


def test_unreachable_hub_is_reported_in_seconds() -> None:
    code = (
        "from megapipe.config.data import DataConfig\n"
        "from megapipe.data.corpus import pieces\n"
        "from megapipe.data.tokenizer import load_tokenizer\n"
        "from megapipe.errors import DataError\n"
        "for use in (lambda: next(pieces(DataConfig(source='owner/name'))),\n"
        "            lambda: load_tokenizer('owner/name')):\n"
        "    try: use()\n"
        "    except DataError as error: print(error)\n"
    )
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | offline | {"HF_HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line, what in zip(lines, ("corpus", "tokenizer"), strict=True):
        assert line.startswith(f"{what} 'owner/name': no such file or folder in ")
        assert "Hugging Face hub" in line


def test_readers_are_silent_and_leave_nothing_outside_the_cache(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "good.jsonl", rows())
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": nope}\n')
    (tmp_path / "bad.parquet").write_text("nothing of the kind")
    code = (
        "import sys\n"
        "from megapipe.config.data import DataConfig\n"
        "from megapipe.data.corpus import pieces\n"
        "from megapipe.errors import DataError\n"
        "for source in sys.argv[1:]:\n"
        "    try: print(len(list(pieces(DataConfig(source=source)))))\n"
        "    except DataError as error: print(error)\n"
    )
    (tmp_path / "home").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, *(str(path) for path in sorted(tmp_path.glob("*.*")))],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(Path(corpus.__file__).parents[3])}
        | dict.fromkeys(("HOME", "HF_HOME", "XDG_CACHE_HOME"), str(tmp_path / "home")),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    bad_json, bad_parquet, good = done.stdout.splitlines()
    assert "cannot be read" in bad_json
    assert "cannot be read" in bad_parquet
    assert good == str(len(TEXTS))
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
