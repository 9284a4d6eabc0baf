"""A stage run on the meta device: the plan is what the program does, whatever that is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.distributed.collectives import start_all_to_all
from megapipe.layers import linear
from megapipe.layers.norm import Norm
from megapipe.layers.parameter import Sharding
from megapipe.layout.resolve import resolve
from megapipe.ops.weight_grad import torch_accumulate
from megapipe.plan.kernels import planned_kernels
from megapipe.plan.run import measure
from megapipe.plan.unit import Kernel, Operation, Transfer, Unit
from tests.parity.cases import Case, configure

ONE = Case(pp=4, in_process=True, layers=8, dtype="fp32", sequence=64)
LAYERS = 2
"""Number of layers of a stage."""
MESSAGE = 64 * 2 * 16 * 4
"""Bytes of hidden states."""


def unit_of(case: Case, stage: int = 1, **options: Any) -> Unit:
    (unit,) = measure(*configure(case), stage, **options)
    return unit


def test_a_unit_is_read_as_it_was_written() -> None:
    unit = unit_of(replace(ONE, tp=2))
    assert Unit.model_validate_json(unit.model_dump_json()) == unit


def test_a_layer_that_keeps_one_more_tensor_holds_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(torch.zeros_like(x))
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    before, forward = unit_of(ONE), Norm.forward
    monkeypatch.setattr(
        Norm, "forward", lambda norm, x, *rest: Keeping.apply(forward(norm, x, *rest))
    )
    after = unit_of(ONE)
    assert after.held - before.held == 2 * LAYERS * MESSAGE
    assert after.queued == before.queued


def test_one_more_collective_is_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    case, product = replace(ONE, tp=2), linear.column_product
    before = unit_of(case)

    def gathering(x: Tensor, weight: Tensor, bias: Tensor | None, sharding: Sharding) -> Tensor:
        start_all_to_all(x.flatten(), sharding.tp)[1]()
        return product(x, weight, bias, sharding)

    monkeypatch.setattr(linear, "column_product", gathering)
    after = unit_of(case)

    def transfers(unit: Unit) -> Counter[Transfer]:
        return Counter(each for each in unit.operations["F"] if isinstance(each, Transfer))

    added = Transfer(
        kind="all_to_all", axis="tp", members=2, span=2, bytes=MESSAGE, dtype="float32"
    )
    assert transfers(after) - transfers(before) == {added: 2 * LAYERS}


def test_another_kernel_is_planned_with_its_own_memory() -> None:
    config, layout = configure(replace(ONE, dtype="bf16"))

    def wide_accumulate(main: Tensor, left: Tensor, right: Tensor) -> None:
        torch_accumulate(main, left.float(), right.float())

    kernels = planned_kernels(config, layout)
    (before,) = measure(config, layout, 1, kernels=kernels)
    (after,) = measure(config, layout, 1, kernels=replace(kernels, accumulate=wide_accumulate))
    assert after.peaks["W"] > before.peaks["W"]
    assert after.peaks["F"] == before.peaks["F"]


@pytest.mark.parametrize(
    "case",
    [
        ONE,
        replace(ONE, model="llama", kv_heads=2),
        replace(ONE, activations="full"),
        replace(ONE, tp=2),
    ],
    ids=["gpt2", "llama", "full", "tp"],
)
def test_flops_are_those_by_which_stages_are_cut_but_for_scores(case: Case) -> None:
    """A causal mask leaves half of these, and all of their diagonal; I computes them once more, and
    the gradients of a norm's vector as a product."""
    config, layout = configure(case)
    unit, stage, length = unit_of(case), layout.stage_layers[1], config.train.sequence_length
    work = layout.model.work(stage, layout.block_policies[1], recompute=False)
    tokens = Fraction(layout.local_length * config.train.microbatch, case.tp)
    values = len(stage.layers) * config.model.heads * (config.model.head_dim or 0)
    again = 2 if case.activations == "full" else 0
    products: dict[Operation, tuple[int, int]] = {
        "F": (2, 2),
        "I": (4 + again, 5 + again),
        "W": (0, 0),
    }
    for operation, (counted, computed) in products.items():
        less = values * (counted * 2 * length - computed * (length + 1))
        wanted = (getattr(work, operation) - less) * tokens
        kernels = (each for each in unit.operations[operation] if isinstance(each, Kernel))
        vectors = sum(each.flops for each in kernels if each.product and each.product[0] == 1)
        assert unit.flops(operation) - vectors == wanted, operation


def test_a_stage_that_recomputes_keeps_its_input_alone() -> None:
    unit = unit_of(replace(ONE, activations="stage"))
    assert unit.kept == MESSAGE
    assert unit.held == unit_of(ONE).held
    assert unit.operations["R"]


def test_experts_with_more_rows_hold_more() -> None:
    case = replace(ONE, tp=2, sequence_parallel=True, ep=2, moe="top 2")
    even, more = unit_of(case), unit_of(case, imbalance=Fraction(3, 2))
    assert more.held > even.held


def test_fetched_experts_have_the_rows_of_this_rank_whatever_the_imbalance() -> None:
    case = replace(ONE, tp=2, sequence_parallel=True, ep=2, moe="top 2", dispatch="fetch")
    assert unit_of(case, imbalance=Fraction(3, 2)) == unit_of(case)


def test_imbalance_is_of_all_experts_that_this_rank_has_parts_of() -> None:
    case = replace(ONE, tp=4, sequence_parallel=True, ep=2, etp=2, moe="top 2")
    unit, inner = unit_of(case, imbalance=Fraction(3, 2)), 12 // case.etp
    products = [each.product for each in unit.operations["F"] if isinstance(each, Kernel)]
    rows = sum(product[0] for product in products if product and product[2] == inner)
    layers = len(configure(case)[1].stage_layers[1].layers)
    assert rows == layers * 64 * 2 * 2 / case.ep * 3 / 2, "choices of all ranks, 3/2 of the mean"


def test_no_more_rows_are_imbalanced_than_there_are() -> None:
    case = replace(ONE, tp=2, sequence_parallel=True, ep=2, moe="top 2")
    assert unit_of(case, imbalance=Fraction(9)) == unit_of(case, imbalance=Fraction(2))


def test_a_user_defined_family_is_run() -> None:
    """Message, weights and products of :class:`tests.parity.tiny_family.Tiny`."""
    config, _ = configure(replace(ONE, pp=1))
    options = {"width": 6, "depth": 3}
    model = ModelConfig(
        source="tests.parity.tiny_family:Tiny", options=options, vocab_size=20, dtype="fp32"
    )
    config, layout = resolve(config.model_copy(update={"model": model}), 1, 20)
    (unit,) = measure(config, layout, 0)
    tokens = 64 * 2
    assert unit.flops("F") == 2 * tokens * (3 * 6 * 6 + 6 * 20)
    assert unit.queued == 0, "autograd computes all weight gradients"


def test_rows_of_experts_add_up_where_choices_are_no_multiple_of_experts() -> None:
    """2 x 10 choices, or 2, are spread over two ranks with 8 experts each: rows are whole."""
    for length, sent in ((10, 20), (1, 2)):
        sections = {
            "model": {
                "layers": 1,
                "hidden": 16,
                "heads": 4,
                "vocab_size": 300,
                "dtype": "fp32",
                "moe": {"num_experts": 16, "expert_ffn_hidden": 24, "top_k": 2},
            },
            "parallel": {"dp": 2, "ep": 2, "device": "cpu"},
            "train": {"sequence_length": length, "microbatch": 1, "global_batch": 2},
        }
        config, layout = resolve(Config.model_validate(sections), 2, 300)
        (unit,) = measure(config, layout, 0)
        rows = [each for each in unit.transfers("F") if each.kind == "all_to_all"]
        assert [each.bytes for each in rows] == [sent * 16 * 4, sent * 4, sent * 16 * 4]


def test_rows_of_experts_are_even_or_those_of_an_imbalance_or_of_a_capacity() -> None:
    """Each rank has 64 tokens, whose two choices go to four experts."""
    mean = 64 * 2

    def rows(imbalance: str | None, ranks: int = 2, **keys: float) -> int:
        moe = {"num_experts": 4, "expert_ffn_hidden": 24, "top_k": 2, **keys}
        sections = {
            "model": {"layers": 2, "hidden": 16, "heads": 4, "vocab_size": 300, "moe": moe},
            "parallel": {"dp": ranks, "ep": ranks, "device": "cpu"},
            "train": {"sequence_length": 32, "microbatch": 2, "global_batch": 2 * ranks},
        }
        config, layout = resolve(Config.model_validate(sections), ranks, 300)
        more = None if imbalance is None else Fraction(imbalance)
        (unit,) = measure(config, layout, 0, imbalance=more)
        every = (each.product for each in unit.operations["F"] if isinstance(each, Kernel))
        return sum(m for m, n, _ in filter(None, every) if n == 24) // 2  # of one layer

    assert rows(None) == rows("1") == mean
    assert rows("1.5") == mean * 3 // 2
    assert rows("2") == rows("4") == 2 * mean
    once = "a token chooses an expert once"
    assert rows("4", ranks=4) == rows(None, ranks=4, capacity_factor=9) == 2 * mean, once
    assert rows(None, capacity_factor=1.5) == rows("4", capacity_factor=1.5) == mean * 3 // 2
    assert rows("1.25", capacity_factor=1.5) == mean * 5 // 4
    assert rows(None, capacity_factor=0.5) == rows("1", capacity_factor=0.5) == mean // 2
