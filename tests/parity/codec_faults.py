"""Faults of the wire types of rows, seeded one at a time: parity has to notice each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe.layers.moe import experts, row_codec
from megapipe.layers.moe.dispatch import Combine, Dispatch
from megapipe.layers.moe.dispatchers.all_to_all import AllToAllDispatch, _Rows
from megapipe.layers.moe.row_codec import CODECS, UNCODED, Int8Codec
from megapipe.layers.moe.transfer import AllToAll, Transfer
from tests.parity.cases import Case
from tests.parity.faults import Patch

STEPPED = Case(dp=2, ep=2, moe="top 2", masked=0.3, layers=2, codec="int8")
ROUNDED = replace(STEPPED, codec="bf16")


def gradients_are_not_coded() -> Patch:
    backward = experts._ExpertsFunction.backward

    def wrong(ctx: Any, grad: Tensor) -> Any:
        plain = replace(ctx.plan.dispatcher, codec="none")
        ctx.plan = ctx.plan._replace(dispatcher=plain)
        return backward(ctx, grad)

    return mock.patch.object(experts._ExpertsFunction, "backward", wrong)


def results_are_not_coded() -> Patch:
    return mock.patch.object(Dispatch, "combine", lambda self: Combine(self, UNCODED))


def rows_that_stay_are_not_coded() -> Patch:
    init, arrived = Transfer.__init__, Transfer.wait

    def begins(self: Any, rows: Tensor, steps: Sequence[AllToAll], *given: Any) -> None:
        (hop,) = steps
        own, start = hop.axis.index, sum(hop.sends[: hop.axis.index])
        self.place = sum(hop.receives[:own])
        self.own = rows[start : start + hop.sends[own]]
        init(self, rows, steps, *given)

    def ends(self: Any) -> Tensor:
        rows = arrived(self)
        rows[self.place : self.place + len(self.own)] = self.own
        return rows

    return mock.patch.multiple(Transfer, __init__=begins, wait=ends)


def one_step_for_all_rows() -> Patch:
    coded = Int8Codec.encode

    def wrong(self: Int8Codec, rows: Tensor) -> Tensor:
        if not len(rows):
            return coded(self, rows)
        line = coded(self, rows.reshape(1, -1))
        steps, step = line[:, : rows.numel()], line[:, rows.numel() :]
        return torch.cat((steps.view(rows.shape), step.expand(len(rows), -1)), -1)

    return mock.patch.object(Int8Codec, "encode", wrong)


def values_are_cut_off() -> Patch:
    """Truncate values, which should be rounded to the nearest."""
    coded = Int8Codec.encode

    def wrong(self: Int8Codec, rows: Tensor) -> Tensor:
        with mock.patch.object(torch.Tensor, "round", torch.Tensor.trunc):
            return coded(self, rows)

    return mock.patch.object(row_codec.Int8Codec, "encode", wrong)


def weights_are_coded() -> Patch:
    def wrong(self: AllToAllDispatch, values: Tensor) -> _Rows:
        return _Rows(self, lambda part: self.rows.permute_weights(values, part), CODECS["bf16"])

    return mock.patch.object(AllToAllDispatch, "dispatch_weights", wrong)


def gradients_of_weights_are_coded() -> Patch:
    return mock.patch.object(
        Dispatch, "combine_weight_grads", lambda self: Combine(self, CODECS["bf16"])
    )


FAULTS: dict[Callable[[], Patch], Case] = {
    gradients_are_not_coded: STEPPED,
    results_are_not_coded: STEPPED,
    rows_that_stay_are_not_coded: STEPPED,
    one_step_for_all_rows: STEPPED,
    values_are_cut_off: STEPPED,
    weights_are_coded: ROUNDED,
    gradients_of_weights_are_coded: ROUNDED,
}
