"""Checkpoints that megatron-core has written load as the same models: equal logits, at the layouts
of both sides. Runs if megatron-core is installed."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megapipe.convert import import_model
from megapipe.convert.megatron.folder import MegatronFolder
from megapipe.layers.microbatch import MicroBatch
from megapipe.testing import run_world
from tests.external.megatron_model import CASES, POSITIONS, VOCABULARY, Layout, save_and_run
from tests.parity import draw
from tests.parity.first_step import first_loss
from tests.parity.jobs import arguments, tiny
from tests.parity.stage_cases import new_stage
from tests.parity.stopped_runs import BASE

pytest.importorskip("megatron.core.models.gpt")

LAYOUTS = {
    "one process": Layout(),
    "tp 2, pp 2": Layout(2, 2),
    "tp 2, pp 2, 2 chunks, layers apart": Layout(2, 2, 2, apart=True),
}
ONE, FOUR, CHUNKS = LAYOUTS
MOST = [("qwen", ONE), ("gpt", FOUR), ("llama", CHUNKS)]
DRAWN = MOST[draw.number(len(MOST), "megatron's layouts")]
"""The pair of layouts that CI runs."""
PAIRS = [
    pytest.param(*pair, marks=pytest.mark.full if pair == DRAWN else pytest.mark.slow)
    for pair in product(CASES, LAYOUTS)
]
TIMEOUT_S = 300.0


def tokens_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (2, POSITIONS - 2), generator=generator)


def logits_of(folder: MegatronFolder, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, V] of megapipe's model, in one process."""
    params = {name.removeprefix("model/"): folder.read(name) for name in folder.shapes()}
    stage, _ = new_stage(folder.model, params)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mb = MicroBatch(index=0, step=0, seed=0, tokens=tokens, labels=tokens, mask=mask, scale=1.0)
    with torch.no_grad():
        return stage.module.logits(None, mb)[..., :VOCABULARY].transpose(0, 1)


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_logits_are_megatron_cores(case: str, layout: str, tmp_path: Path) -> None:
    sizes, tokens = LAYOUTS[layout], tokens_of(3)
    given = (case, tmp_path, tokens, sizes)
    expected = run_world(sizes.tp * sizes.pp, save_and_run, *given, timeout_s=TIMEOUT_S)[-1]
    for form in ("legacy", "torch_dist"):
        folder = MegatronFolder.open(tmp_path / form)
        assert folder.model.tied_embeddings == CASES[case].tied
        error = (logits_of(folder, tokens) - expected).abs().max()
        assert error <= 1e-5, (form, error)


@pytest.mark.slow
def test_training_goes_on_at_another_layout(tmp_path: Path) -> None:
    """The loss of the first step at tp 2 x pp 2."""
    run_world(1, save_and_run, "llama", tmp_path, tokens_of(3), Layout(), timeout_s=TIMEOUT_S)
    folder = MegatronFolder.open(tmp_path / "torch_dist")
    import_model(folder, tmp_path / "new", tokenizer="byte")
    settings = {k: v for k, v in {**tiny(tmp_path), **BASE}.items() if not k.startswith("model.")}
    argv = [str(tmp_path / "new/config.yaml"), *arguments(settings), "checkpoint.load_only=weights"]
    ranks = run_world(4, first_loss, [*argv, "parallel.tp=2", "parallel.pp=2"], timeout_s=TIMEOUT_S)
    loss, (tokens, labels, mask) = ranks[0]
    logits = logits_of(folder, torch.from_numpy(tokens))
    losses = F.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(labels).flatten(), reduction="none"
    )
    expected = losses[torch.from_numpy(mask).flatten().bool()].mean().item()
    assert [rank[0] for rank in ranks] == [loss] * 4
    assert loss == pytest.approx(expected, rel=1e-5)
