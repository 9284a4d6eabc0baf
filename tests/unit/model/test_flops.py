"""FLOPs: against torch's own counter, and against the formula of the literature."""

import pytest
import torch
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from megapipe.cli import parse
from megapipe.config.model import ModelConfig
from megapipe.layout.resolve import resolve
from megapipe.model.gpt.flops import causal_flops, head_flops, layer_flops
from tests.parity.families import token_flops

SPLIT = "parallel.sequence_parallel=true"
EXPERTS = (
    *("model.layers=2", "model.hidden=64", "model.heads=8", "model.vocab_size=512"),
    *(
        "model.moe.num_experts=16",
        "model.moe.expert_ffn_hidden=24",
        "model.moe.capacity_factor=1.3",
    ),
    "train.sequence_length=64",
)


def test_formula_of_gpt() -> None:
    """6N + 12 L h s with N = 12 L h^2 + V h."""
    layers, hidden, length, vocabulary = 24, 1024, 2048, 50257
    model = ModelConfig(layers=layers, hidden=hidden, heads=16)
    model = model.resolved(vocab_size=vocabulary, sequence_length=length)
    weights = 12 * layers * hidden**2 + vocabulary * hidden
    assert token_flops(model, length) == 6 * weights + 12 * layers * hidden * length


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_counted(activation: str) -> None:
    """The matrix products of a layer and a head, written out and counted by torch."""
    model = ModelConfig.model_validate(
        {"hidden": 48, "heads": 8, "kv_heads": 2, "head_dim": 10, "activation": activation}
    ).resolved(vocab_size=101, sequence_length=16)
    s, h, f, d = 16, 48, model.ffn_hidden or 0, 10
    x = torch.zeros(s, h)
    q = torch.zeros(8, s, d)
    with FlopCounterMode(display=False) as counter:
        linear(x, torch.zeros((8 + 2 * 2) * d, h))
        torch.bmm(torch.bmm(q, q.transpose(1, 2)), q)
        linear(torch.zeros(s, 8 * d), torch.zeros(h, 8 * d))
        linear(x, torch.zeros((2 if activation == "swiglu" else 1) * f, h))
        linear(torch.zeros(s, f), torch.zeros(h, f))
    assert counter.get_total_flops() == s * layer_flops(model, s)
    assert head_flops(model) == 2 * h * 101


def test_windows_count_what_is_seen() -> None:
    """One of three layers sees all; each token of the others sees four positions at most."""
    model = ModelConfig(layers=3, hidden=48, heads=8, sliding_window=4, full_attention_every=3)
    model = model.resolved(vocab_size=101, sequence_length=16)
    per_position = layer_flops(model, 1) - layer_flops(model, 0)
    whole = layer_flops(model, 16)
    assert layer_flops(model, 16, model.window_of(0)) == whole - 12 * per_position
    assert token_flops(model, 16) == 3 * (3 * whole - 24 * per_position + head_flops(model))
    seen = [min(i + 1, 4) for i in range(9)]
    total = 3 * 9 * layer_flops(model, 0) + per_position * (2 * sum(seen) + 45)
    assert 3 * causal_flops(model, 9) == pytest.approx(total, abs=3)


@pytest.mark.parametrize(("keys", "rows"), [((), 2.75), (("parallel.tp=2", SPLIT), 5.5)])
def test_empty_rows_of_experts_are_computed_and_no_model_flops(
    keys: tuple[str, ...], rows: float
) -> None:
    """Each of 16 experts has room for 11 rows of each of a rank's sequences, or of its half of
    one."""
    given = (*EXPERTS, *keys)
    plain, padded = (
        resolve(parse([*given, f"experts.pad_to_capacity={pad}"]).config, None, None)[1].model
        for pad in ("false", "true")
    )
    row = 2 * 64 * 2 * 24
    more = 2 * row * (rows - 2)
    before, now = (family.work(family.whole, (), recompute=False) for family in (plain, padded))
    assert [b - a for a, b in zip(before, now, strict=True)] == [more, more, more, 0]
    assert padded.token_flops() == plain.token_flops()
    costs = [sum(family.unit_costs(None)) for family in (plain, padded)]
    assert costs[1] - costs[0] == 3 * more
