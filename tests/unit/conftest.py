"""What several files of unit tests use."""

import pytest

from megapipe.schedule.commands import main


@pytest.fixture
def ask(capsys):
    """What a command of scripts/schedule.py prints."""

    def run(*argv: object) -> str:
        code = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    return run
