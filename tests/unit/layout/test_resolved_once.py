"""What is decided once: the order, its proof, the device."""

from typing import Any

import pytest

import megapipe.layout.devices
import megapipe.layout.resolve
from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import BYTE_VOCABULARY, resolve
from megapipe.plan.measurements import BY_UNITS

BASE = ("model.layers=8", "model.heads=8", "model.hidden=64", "train.global_batch=48")


def configure(*overrides: str) -> Config:
    return parse([*BASE, *overrides]).config


@pytest.mark.parametrize("schedule", ["zb_2p", "interleaved_1f1b"])
def test_an_order_is_made_and_proved_once(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the tokenizer is there, an order that depends on costs has one micro-batch."""
    made, proved = [], []
    module = megapipe.layout.resolve
    load, prove = module.load, module.validate
    monkeypatch.setattr(
        module,
        "load",
        lambda *args, **more: made.append(more["microbatches"]) or load(*args, **more),
    )
    monkeypatch.setattr(
        module,
        "validate",
        lambda order: proved.append(order.whole_microbatches) or prove(order),
    )
    keys = ("parallel.pp=2", f"pipeline.schedule={schedule}")
    config, layout = resolve(configure(*keys), None, None, measure=BY_UNITS)
    assert (made.count(layout.microbatches), proved) == (1, [layout.microbatches])
    made.clear(), proved.clear()
    known = {"before": layout, "measure": BY_UNITS}
    assert resolve(config, None, BYTE_VOCABULARY, **known) == (config, layout)
    assert (made, proved) == ([], [])

    config, layout = resolve(configure(*keys, "data.tokenizer=some/where"), None, None)
    again, other = resolve(config, None, BYTE_VOCABULARY, before=layout, measure=BY_UNITS)
    assert (made.count(other.microbatches), proved.count(other.microbatches)) == (1, 1)
    assert again.model.vocab_size == BYTE_VOCABULARY
    assert other.schedule.whole_microbatches == other.microbatches
    assert other is not layout


def test_the_device_is_known_before_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one that is named, or this machine's driver knows it; a run says what it found."""

    def layout_of(*keys: str, **more: Any) -> Layout:
        return resolve(configure(*keys), None, None, **more)[1]

    devices = megapipe.layout.devices
    monkeypatch.setattr(devices, "local_device", lambda: None)
    assert (layout_of().device, layout_of().loss_chunk) == ("cpu", 256)
    assert layout_of("parallel.device=cuda").device == "cuda"
    assert layout_of("plan.device=H100").loss_chunk == 4096
    found = layout_of("plan.device=H100", device="cpu", before=layout_of("plan.device=H100"))
    assert (found.device, found.loss_chunk) == ("cpu", 256)
    monkeypatch.setattr(devices, "local_device", lambda: "NVIDIA H100 PCIe")
    assert layout_of().device == "cuda"
    assert layout_of("parallel.device=cpu").device == "cpu"
