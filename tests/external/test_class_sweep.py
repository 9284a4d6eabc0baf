"""Every causal language model of the installed transformers, in a pipeline (see class_sweep)."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.external.class_sweep import sweep

LEAST, ATTENDED = 100, 60
"""Number of types that are at least equal to the untouched model, and those of them that are so
with documents and with keys and values kept."""


@pytest.mark.full
def test_every_type_is_equal_or_refused() -> None:
    verdicts = list(sweep(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    for each in verdicts:
        print(f"{each.name:24} {each.kind:8} {each.reason}")
    assert [each for each in verdicts if each.kind == "wrong"] == []
    assert sum(each.kind == "equal" for each in verdicts) >= LEAST
    assert sum(each.attended for each in verdicts) >= ATTENDED


@pytest.mark.parametrize("name", ["deepseek_v4", "hy_v4", "gemma4_text"])
def test_what_layers_share_is_refused(name: str) -> None:
    (verdict,) = sweep([name])
    assert verdict.kind == "refused", verdict
