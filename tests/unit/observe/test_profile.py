"""Traces of a step: what is written per rank, and what is no trace."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from megapipe.errors import DataError
from megapipe.observe.profile import merge
from tests.parity.profiled import named, profile_step, read


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profile_step(tmp_path_factory.mktemp("run"))


def test_a_rank_s_trace_has_names_operators_and_its_place(step: Path) -> None:
    assert step.name == "step_000020"
    trace = read(step / "rank_0000.json.gz")
    assert trace["megapipe"] == {"rank": 0, "place": "pp 0 dp 0 tp 0", "step": 20}
    (operation,) = named(trace, "F stage 0 micro-batch 3")
    (matmul,) = named(trace, "aten::mm")[:1]
    assert operation["ts"] <= matmul["ts"]
    assert matmul["ts"] + matmul["dur"] <= operation["ts"] + operation["dur"]


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no rank_\*.json.gz, expected the folder of a profiled"):
        merge(tmp_path)
    for content in (b"", b"{", gzip.compress(b"{}"), gzip.compress(b"{}")[:-3]):
        (tmp_path / "rank_0001.json.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"rank_0001.json.gz is not a trace of a rank"):
            merge(tmp_path)
