"""Tensor-parallel layers in bf16, fp16 and fp32, bit by bit, on numbers that no type has to round.

Bounds on rounding errors hide small mistakes: in bf16 a row-parallel output that is 0.4% too large
is as good as a rounded one. Small whole numbers are exact in every type, and so is every sum of
them up to 2**8 (bf16), 2**11 (fp16) or 2**24 (fp32) in any order. On these each layer has to give
what whole-number arithmetic gives, on every rank, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megapipe.distributed.collectives import all_reduce
from megapipe.distributed.mesh import Grid, ParallelMesh
from megapipe.layers import linear
from megapipe.layers.embedding import WordEmbedding
from megapipe.layers.linear import ColumnParallelLinear, RowParallelLinear
from megapipe.layers.parameter import Sharding, spec_of
from megapipe.layers.specs import column_linear, row_linear, vocabulary
from megapipe.layers.weight_grad import main_grad
from megapipe.testing import GROUP_TIMEOUT_S, World, run_world
from tests.parity.faults import Patch, scaled
from tests.parity.split_layers import by_sequence, give_values, part

S, B, IN, OUT, VOCAB = 8, 3, 16, 12, 300
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def numbers(*shape: int, largest: int, seed: int) -> Tensor:
    """Return whole numbers of -largest .. largest, int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator)


def shardings(world: World) -> Iterator[Sharding]:
    """Yield every tp that four ranks can have, with and without sequence parallelism, in each
    type."""
    world.restart()
    for tp in (1, 2, 4):
        grid = Grid(dp=4 // tp, tp=tp)
        axis = ParallelMesh(grid, device=torch.device("cpu"), timeout_s=GROUP_TIMEOUT_S).tp
        for dtype in DTYPES:
            yield Sharding(axis, False, dtype)
            yield Sharding(axis, True, dtype)


def assert_same(what: str, actual: Tensor, exact: Tensor) -> None:
    """Check `actual` against `exact` [..] int64, of which no value is too large for the type of
    `actual`."""
    assert exact.abs().max() <= 2**8
    assert actual.shape == exact.shape
    off = actual.double() - exact.double()
    assert not off.any(), f"{what}: {off.abs().max():.3g} off"


def check_linear(sharding: Sharding, *, column: bool) -> None:
    """Check output, gradient of the input, weight and bias, of one whole layer over tp."""
    x = numbers(S, B, IN, largest=2, seed=1)
    weight = numbers(OUT, IN, largest=2, seed=2)
    bias = numbers(OUT, largest=9, seed=3)
    grad = numbers(S, B, OUT, largest=2, seed=4)
    y, grad_x = x @ weight.T + bias, grad @ weight  # [s, b, out], [s, b, in]
    grad_weight = torch.einsum("sbo,sbi->oi", grad, x)

    kind = ColumnParallelLinear if column else RowParallelLinear
    specs = column_linear if column else row_linear
    layer = kind(sharding, *specs("a", (OUT, IN), bias=True, std=0.1))
    give_values(layer, {"a.weight": weight, "a.bias": bias})

    def inner(full: Tensor) -> Tensor:
        return part(full, sharding.tp, -1)

    def outer(full: Tensor) -> Tensor:
        return by_sequence(full, sharding)

    of_input, of_output = (outer, inner) if column else (inner, outer)
    here = of_input(x).to(sharding.dtype).requires_grad_()
    out = layer(here)
    assert_same("output", out, of_output(y))
    sharding.queue.open(0)
    out.backward(of_output(grad).to(sharding.dtype))
    with torch.no_grad():
        sharding.queue.run(0)
    assert here.grad is not None
    assert_same("gradient of the input", here.grad, of_input(grad_x))
    check_main_grads(layer, {"a.weight": grad_weight, "a.bias": grad.sum((0, 1))}, sharding)


def check_embedding(sharding: Sharding) -> None:
    """Check lookups in a table that is split over tp; one row is asked for more than once."""
    tokens = (37 * torch.arange(B * S).view(B, S)) % VOCAB
    tokens[0, :4] = VOCAB - 1
    table = numbers(VOCAB, OUT, largest=100, seed=5)
    grad = numbers(S, B, OUT, largest=20, seed=6)
    wanted = torch.zeros_like(table).index_add_(0, tokens.T.flatten(), grad.flatten(0, 1))

    layer = WordEmbedding(
        sharding, vocabulary("embedding.word.weight", VOCAB, OUT, role="embedding", std=0.1)
    )
    give_values(layer, {"embedding.word.weight": table})
    out = layer(tokens)
    assert_same("embedded tokens", out, by_sequence(table[tokens].transpose(0, 1), sharding))
    sharding.queue.open(0)
    out.backward(by_sequence(grad, sharding).to(sharding.dtype))
    with torch.no_grad():
        sharding.queue.run(0)
    check_main_grads(layer, {"embedding.word.weight": wanted}, sharding)


def check_main_grads(module: nn.Module, wanted: dict[str, Tensor], sharding: Sharding) -> None:
    for parameter in module.parameters():
        spec, grad = spec_of(parameter), main_grad(parameter)
        assert grad.dtype == torch.float32
        if spec.grad_is_partial:
            grad = all_reduce(grad.clone(), sharding.tp)
        padded = torch.zeros(spec.sizes, dtype=torch.int64)
        region = tuple(
            slice(start, min(start + size, length))
            for start, size, length in zip(spec.offsets, spec.sizes, spec.shape, strict=True)
        )
        values = wanted[spec.name][region]
        padded[tuple(slice(0, n) for n in values.shape)] = values
        assert_same(f"gradient of {spec.name}", grad, padded)


def check_all(world: World) -> None:
    for sharding in shardings(world):
        check_linear(sharding, column=True)
        check_linear(sharding, column=False)
        check_embedding(sharding)


FACTORS = {torch.bfloat16: 1 + 2**-8, torch.float16: 1 + 2**-11, torch.float32: 1 + 2**-23}
"""The smallest errors of scale that a type can hold at all: 0.4%, 0.05% and 1.2e-7."""


def scaled_input_grad(function: type[Function], factor: float) -> Patch:
    """Patch a linear layer's backward to give `factor` times the gradient of its input."""
    backward: Callable[..., tuple[Tensor, None, None, None]] = function.backward

    def wrong(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad_x, *rest = backward(ctx, grad)
        return grad_x * factor, *rest

    return mock.patch.object(function, "backward", wrong)


def errors(factor: float) -> dict[str, tuple[Patch, bool]]:
    """Return errors of scale in what each layer computes: the patch, and whether the layer is
    column parallel."""
    return {
        "row product": (scaled(linear, "row_product", factor), False),
        "row input gradient": (scaled_input_grad(linear._RowFunction, factor), False),
        "column product": (scaled(linear, "column_product", factor), True),
        "column input gradient": (scaled_input_grad(linear._ColumnFunction, factor), True),
    }


def notice(world: World) -> list[str]:
    """Return the errors of scale that the checks above let pass."""
    missed = []
    for sharding in shardings(world):
        factor = 1 + 1.01 * (FACTORS[sharding.dtype] - 1)
        for name, (patch, column) in errors(factor).items():
            with patch:
                try:
                    check_linear(sharding, column=column)
                except AssertionError:
                    continue
            missed.append(f"{name} x {factor} in {sharding.dtype}, tp {sharding.tp.size}")
    return missed


def test_layers_are_exact_where_no_number_needs_rounding() -> None:
    run_world(4, check_all)


def test_the_smallest_errors_of_scale_are_noticed() -> None:
    assert run_world(4, notice) == [[]] * 4
