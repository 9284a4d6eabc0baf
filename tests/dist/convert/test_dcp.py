"""Folders of torch.distributed.checkpoint that several processes have written."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint.find import find_checkpoint
from megapipe.convert import export
from megapipe.convert.dcp.files import DcpFiles
from megapipe.convert.dcp.folder import open_dcp
from megapipe.testing import run_world
from tests.parity.both_ways import write_run
from tests.parity.converted import assert_same, state_of
from tests.parity.dcp_files import save_shards


@pytest.mark.full
def test_what_several_processes_have_saved(tmp_path: Path) -> None:
    """Rows of 2 ranks, which do not divide the vocabulary, and columns."""
    model, params = write_run(tmp_path, "llama_gqa")
    export(find_checkpoint(tmp_path / "run"), tmp_path / "hf", tokenizer="none")
    run_world(2, save_shards, tmp_path)
    for dim in (0, 1):
        source = open_dcp(tmp_path / f"dcp{dim}", config=tmp_path / "hf", prefix="model.")
        assert source.model == model
        assert_same({n.removeprefix("model/"): source.read(n) for n in source.shapes()}, params)
        files = DcpFiles.open(tmp_path / f"dcp{dim}", prefix="model.")
        for name, tensor in state_of(tmp_path / "hf").items():
            index = tuple(slice(math.ceil(n / 5), n - 1) for n in tensor.shape)
            assert torch.equal(files.read(name, index), tensor[index]), name
