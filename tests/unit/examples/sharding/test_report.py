"""The command prints every method, and refuses sizes that cannot be."""

from __future__ import annotations

import re

import pytest

from examples.sharding.__main__ import main
from tests.parity.package_files import FILES

METHODS = (
    "GSPMD, two annotations",
    "OneFlow, sums deferred",
    "Mesh-TensorFlow, table",
    "PartIR, DP",
    "PartIR, DP+TP+ZeRO-3",
    "Automap, block",
    "Automap, MLP",
    "Tofu, three products",
    "GSPMD, stages shifted",
    "nnScaler, 1f1b",
    "nnScaler, co-shard of an MLP",
    "Slapo, GPT of 2 blocks",
)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    said: list[str] = []
    assert (
        main(["--hidden", "8", "--heads", "2", "--batch", "4", "--sequence", "4"], said.append) == 0
    )
    return said


def test_every_method_has_a_line(lines: list[str]) -> None:
    for method in METHODS:
        assert any(line.startswith(f"  {method}: ") for line in lines), method


def test_every_error_is_rounding(lines: list[str]) -> None:
    errors = [float(each) for line in lines for each in re.findall(r"error (\S+)$", line)]
    assert len(errors) >= 14
    assert max(errors) < 1e-12
    assert not any("differ" in line and "from" in line for line in lines)


def test_the_package_does_not_import_the_example() -> None:
    imports = re.compile(r"^\s*(from|import) examples\b", re.MULTILINE)
    users = [name for name, path in FILES.items() if imports.search(path.read_text("utf-8"))]
    assert len(FILES) > 100
    assert not users


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--heads", "3"], "heads divide hidden equally"),
        (["--batch", "0"], "all are at least 1"),
        (["--batch", "2"], "heads have to be a multiple of 2, batch of 4"),
    ],
)
def test_sizes_that_cannot_be(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: sizes {")
    assert message in line
