"""Results without values are those that torch gives, and are asked of torch once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.ops.live_storages import tensors_in
from megapipe.plan.results import Results

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Counted:
    """An operation that counts its calls."""

    def __init__(self, operation: Callable[..., Any]) -> None:
        self.operation, self.calls = operation, 0
        self.tags = getattr(operation, "tags", ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.operation(*args, **kwargs)


def described(out: Any) -> list[object]:
    """Return all that may be known of results."""
    results = out if isinstance(out, tuple) else [out]
    return [
        (tuple(x.shape), x.stride(), x.dtype, x.untyped_storage().nbytes(), x.storage_offset())
        if isinstance(x, Tensor)
        else x
        for x in results
    ]


def called(results: Results, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return results.call(operation, args, kwargs, [*tensors_in(args), *tensors_in(kwargs)])


NEW = {
    "broadcast and promoted": (aten.add.Tensor, (meta(3, 1), meta(5, dtype=torch.float64))),
    "not contiguous": (aten.mul.Tensor, (meta(4, 3).t(), 2.0)),
    "several": (aten.native_layer_norm.default, (meta(2, 8), [8], meta(8), None, 1e-5)),
    "numbers among several": (
        aten._scaled_dot_product_flash_attention.default,
        (*[meta(2, 4, 16, 8, dtype=torch.bfloat16)] * 3, 0.0, True),
    ),
    "a list": (aten.cat.default, ([meta(2, 3), meta(4, 3)],)),
    "of no tensor": (aten.empty.memory_format, ([2, 3],), {"device": "meta"}),
    "nothing": (aten.empty.memory_format, ([0, 3],), {"device": "meta"}),
}


@pytest.mark.parametrize("case", NEW)
def test_new_tensors_are_made_alike_without_asking(case: str) -> None:
    operation, args, *kwargs = NEW[case]
    counted, results, given = Counted(operation), Results(), dict(*kwargs)
    expected = described(operation(*args, **given))
    outs = [called(results, counted, *args, **given) for _ in range(3)]
    assert counted.calls == 1
    assert all(described(out) == expected for out in outs)
    storages = [x.untyped_storage()._cdata for out in outs for x in tensors_in(out)]
    assert len(set(storages)) == len(storages)


def test_what_is_filled_is_returned() -> None:
    results, add, out = Results(), Counted(aten.add_.Tensor), Counted(aten.mul.out)
    for _ in range(2):
        x, y = meta(2, 3), meta(2, 3)
        assert called(results, add, x, y) is x
        assert called(results, out, x, x, out=y) is y
    assert add.calls == out.calls == 1


def test_views_and_what_changes_shapes_are_asked_for_each_time() -> None:
    results = Results()
    for operation, args in (
        (aten.t.default, ()),
        (aten._unsafe_view.default, ([6],)),
        (aten.split.Tensor, (1,)),
        (aten.transpose_.default, (0, 1)),
        (aten.resize_.default, ([2, 3],)),
    ):
        counted = Counted(operation)
        for _ in range(2):
            x = meta(2, 3)
            outs = [*tensors_in(called(results, counted, x, *args))]
            assert all(y.untyped_storage()._cdata == x.untyped_storage()._cdata for y in outs)
        assert counted.calls == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((meta(2, dtype=torch.int64), 1), (meta(2, dtype=torch.int64), 1.0)),
        ((meta(2, 2), 1.0), (meta(2, 2).t(), 1.0)),
        ((meta(2), meta(2)), (meta(2), meta(2, dtype=torch.float64))),
    ],
    ids=["kind of number", "strides", "type"],
)
def test_another_kind_of_call_is_another(first: Iterable[Any], second: Iterable[Any]) -> None:
    results, counted = Results(), Counted(aten.mul.Tensor)
    for args in (first, second):
        assert described(called(results, counted, *args)) == described(aten.mul.Tensor(*args))
    assert counted.calls == 2


def test_values_are_never_assumed() -> None:
    """Results may depend on what a tensor of the host holds."""
    results = Results()
    for values in ([0, 1], [1, 1]):
        assert len(called(results, aten.nonzero.default, torch.tensor(values))) == sum(values)


class Checked(TorchDispatchMode):
    """A mode that compares each result with torch's."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self.results, self.seen = results, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = func._schema.is_mutable
        expected = None if changes else described(func(*args, **(kwargs or {})))
        out = called(self.results, func, *args, **(kwargs or {}))
        if not changes:
            self.seen += 1
            assert described(out) == expected, func
        return out


def test_all_of_a_layer() -> None:
    """Forward and backward, twice."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, device="meta")
    with Checked(Results()) as checked:
        for _ in range(2):
            layer(meta(2, 8, 16)).sum().backward()
    assert checked.seen > 100
