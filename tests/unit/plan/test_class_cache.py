"""Kept costs of a transformers class are those of its configuration."""

from __future__ import annotations

import json
from pathlib import Path

from megapipe.cli import parse
from megapipe.layout.resolve import resolve
from megapipe.plan.cache import Cache
from megapipe.plan.units import Units

SIZES = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def held(file: Path, kept: Path, width: int) -> int:
    """Return the bytes that a stage of a class of this width holds, from costs in `kept`."""
    file.write_text(json.dumps({**SIZES, "intermediate_size": width}))
    config = parse([f"model.source=hf:{file}", "train.sequence_length=16"]).config
    config, layout = resolve(config, None, None, device="cpu")
    return sum(unit.held for unit in Units(config, layout, Cache([kept])).of(0))


def test_another_configuration_under_the_same_name_is_measured(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    narrow = held(tmp_path / "config.json", kept, 48)
    assert held(tmp_path / "config.json", kept, 96) > narrow
    assert held(tmp_path / "config.json", kept, 48) == narrow
