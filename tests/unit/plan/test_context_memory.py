"""Memory of attention by blocks, where short documents go to a kernel at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.ops.documents import Documents
from megapipe.plan import run
from megapipe.plan.activation_memory import peak_activations
from megapipe.plan.run import measure
from megapipe.plan.unit import Unit
from megapipe.plan.units import Units

LENGTH = 1024
KEYS = (
    f"train.sequence_length={LENGTH}",
    "model.layers=1",
    "model.heads=16",
    "model.kv_heads=4",
    "model.hidden=1024",
    "model.dtype=bf16",
    "model.vocab_size=257",
    "activations.policy=full",
    "activations.keep_attention=true",
    "parallel.device=cuda",
)
MASKED = "data.document_mask=true"


def resolved(*keys: str, cp: int = 1) -> tuple[Config, Layout]:
    return resolve(parse([*KEYS, f"parallel.cp={cp}", *keys]).config, cp, None)


def unit_of(*keys: str, cp: int) -> Unit:
    (unit,) = measure(*resolved(MASKED, *keys, cp=cp), 0)
    return unit


def some(samples: int, often: float) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(samples)
    drawn = torch.rand(samples, LENGTH, generator=generator, device="cpu")
    return (drawn < often).long().cumsum(-1)


@pytest.mark.parametrize(("samples", "cp"), [(3, 1), (1, 2)])
def test_no_documents_take_more_than_is_planned(
    samples: int, cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a kernel takes many at once, they do not take much less either."""
    keys = (f"train.microbatch={samples}", f"train.global_batch={samples}")
    planned = unit_of(*keys, cp=cp)
    whole = unit_of(*keys, "kernels.only.attention=cudnn", cp=cp)
    within = []
    for often in (1.0, 0.1, 0.02):
        ids = some(samples, often)

        def drawn(_: Tensor, device: torch.device, ids: Tensor = ids) -> Documents:
            return Documents(ids, device)

        with monkeypatch.context() as patched:
            patched.setattr(run, "Documents", drawn)
            found = unit_of(*keys, cp=cp)
        for what in ("F", "I", "B"):
            assert found.peaks[what] <= planned.peaks[what], f"{what}, {often}"
        within.append(found.peaks["I"])
    assert planned.peaks["I"] > whole.peaks["I"]
    assert max(within) - planned.held > 0.9 * (planned.peaks["I"] - planned.held)


def test_where_it_counts() -> None:
    """It counts on a GPU, in narrow types, where attention ends at documents."""

    def most(*keys: str, **given: Any) -> int:
        return peak_activations(Units(*resolved(*keys, **given)), 0).device

    assert most(MASKED, cp=2) > most(cp=2)
    for keys in (
        ("parallel.device=cpu",),
        ("model.dtype=fp32",),
        ("kernels.only.attention=cudnn",),
    ):
        assert most(MASKED, *keys, cp=2) <= most(*keys, cp=2)
