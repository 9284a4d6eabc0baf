"""Pinned memory is allocated before the first step: allocating more may wait for a spinning
receive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.layers import offload
from megapipe.ops.documents import Documents
from tests.fake_cuda.world import observe, run_world
from tests.parity.cases import END, Case, Rows, configure
from tests.parity.tiers import in_parts

OFFLOAD = Case(pp=2, m=4, layers=4, activations="offload", dtype="fp32", steps=4)
CASES = [
    replace(OFFLOAD, schedule="zb_h1", post_validation=True),
    replace(OFFLOAD, schedule="zb_v", activations="of each some"),
    replace(OFFLOAD, schedule="interleaved_1f1b", chunks=2, model="llama"),
    replace(OFFLOAD, schedule="dualpipe", offload="host"),
    Case(pp=2, m=4, documents=True, dropout=0.2, offload="host", state_dtype="bf16", dtype="bf16"),
]


@contextmanager
def counting() -> Iterator[list[int]]:
    """Collect the bytes of each pinned allocation."""
    found: list[int] = []
    with ExitStack() as patches:
        for owner, name in ((torch, "empty"), (torch, "zeros"), (Tensor, "pin_memory")):
            make = getattr(owner, name)

            def noting(*args: Any, make: Any = make, **options: Any) -> Tensor:
                made: Tensor = make(*args, **options)
                if options.get("pin_memory") or make.__name__ == "pin_memory":
                    found.append(made.nbytes)
                return made

            patches.enter_context(mock.patch.object(owner, name, noting))
        yield found


def pinned(world: Any, cases: list[Case]) -> list[tuple[int, list[int]]]:
    """Return, for each case, the number of pinned allocations before the first program, and the
    later ones."""
    results = []
    for case in cases:
        config, layout = configure(case)
        with counting() as found:
            step = TrainStep(config, layout, world.mesh(case.grid), document_end=END)
            rows = Rows(case)
            step._warm_up(0, rows)
            before = len(found)
            for i in range(3):
                step.train(i, rows)
            step.settle()
        results.append((before, found[before:]))
    return results


@in_parts("case", CASES, full=4, ids=lambda case: case.name)
def test_nothing_is_pinned_in_a_step(case: Case) -> None:
    for ((before, later),) in run_world(2, pinned, [case]):
        assert before > 0
        assert not later


def ends_of_documents(world: Any) -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 3, 3]])
    near = ids.cuda()
    for s in (6, 3, 1):
        with counting() as found:
            runs = Documents(ids, near.device, near).runs(s)
        assert not found
        expected = Documents(ids, ids.device).runs(s)
        assert runs.cu_seqlens_q.tolist() == expected.cu_seqlens_q.tolist()
        assert (
            runs.cu_seqlens_k.tolist()
            == expected.cu_seqlens_k.tolist()
            == [0, 2, 5, 6, 12, 13, 14, 15, 18]
        )
        assert (runs.max_seqlen_q, runs.max_seqlen_k) == (
            expected.max_seqlen_q,
            expected.max_seqlen_k,
        )


@pytest.mark.full
def test_where_documents_end_is_found_on_the_device() -> None:
    _, (report,) = observe(1, ends_of_documents)
    assert not report.faults
    assert report.host_waits == {"copy from the host": 1, "copy to the host": 6}, (
        "those of the test"
    )


def never_used_again(world: Any, case: Case) -> list[tuple[int, list[int]]]:
    def frees(self: Any, host: Tensor) -> None:
        """Keep no reference to the tensor."""

    with mock.patch.object(offload._Side, "release", frees):
        return pinned(world, [case])


@pytest.mark.full
def test_memory_that_is_not_used_again_is_noticed() -> None:
    assert all(later for ((_, later),) in run_world(2, never_used_again, OFFLOAD))
