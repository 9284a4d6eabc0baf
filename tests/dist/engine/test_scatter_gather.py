"""Shares of messages: what arrives is what was sent, in a tp-th of the bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megapipe.distributed.mesh import Grid
from megapipe.engine.channels import ProcessGroupChannels
from megapipe.engine.scatter_gather import ScatterGatherChannels
from megapipe.schedule.ir import Kind, Op
from megapipe.testing import World, run_world
from tests.parity.ranks import Case, Outcome, run_cases

SHAPES = [(4, 3, 2), (3, 5, 1), (1, 1, 1), (2, 1, 7)]
"""Shapes that two and three ranks divide, and ones that they do not."""


def tensor_of(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(SHAPES[index], generator=generator, dtype=torch.float64)


def exchange(world: World, tp: int, debug: bool) -> list[list[int]]:
    """Send every message forward and half of them back; return the bytes that each one took."""
    mesh = world.mesh(Grid(pp=2, tp=tp))
    lines = ProcessGroupChannels(mesh, [(0, 1), (1, 0)], dtype=torch.float64, debug=debug)
    channels = ScatterGatherChannels(lines, mesh.tp)
    messages = [Op(Kind.F, 0, i) for i in range(len(SHAPES))]
    sizes = []
    for messages_, sender in ((messages, 0), (messages[:2], 1)):
        peer = 1 - mesh.pp.index
        if mesh.pp.index == sender:
            for message in messages_:
                channels.outgoing[peer].send(message, tensor_of(message.microbatch))
            sent = [tensor for _, tensor in lines.outgoing[peer].in_flight]
            sizes.append([t.untyped_storage().nbytes() for t in sent if t.is_floating_point()])
            channels.outgoing[peer].finish()
        else:
            channels.incoming[peer].expect([(m, SHAPES[m.microbatch]) for m in messages_])
            for message in messages_:
                assert channels.incoming[peer].receive().equal(tensor_of(message.microbatch))
    return sizes


@pytest.mark.parametrize(("tp", "debug"), [(2, False), (3, True)])
def test_what_arrives_is_what_was_sent(tp: int, debug: bool) -> None:
    lengths = {2: [12, 8, 1, 7], 3: [8, 5, 1, 5]}[tp]
    bytes_ = [8 * length for length in lengths]
    results = run_world(2 * tp, exchange, tp, debug)
    assert results == [[bytes_]] * tp + [[bytes_[:2]]] * tp


CASES = [
    Case(tp=2, pp=2, m=3, schedule="zb_h1", dtype="fp32", model="llama", dropout=0.1),
    Case(tp=2, pp=2, m=4, schedule="seq1f1b", slices=2, debug=True, sequence=7, batch=1),
    Case(tp=2, pp=2, m=4, schedule="chimera", activations="full"),
    Case(tp=2, pp=2, m=3, dtype="bf16", activations="stage", post_validation=True),
]


def run_both(world: World) -> list[tuple[Outcome, Outcome]]:
    off = run_cases(world, CASES)
    on = run_cases(world, [replace(case, scatter="on") for case in CASES])
    return list(zip(off, on, strict=True))


@pytest.mark.full
def test_a_run_has_the_same_bits() -> None:
    for outcomes in run_world(4, run_both, timeout_s=120):
        for case, (off, on) in zip(CASES, outcomes, strict=True):
            assert (on.losses, on.norms) == (off.losses, off.norms), case.name
            for ours, others in zip(
                (*on.grads, *on.copies), (*off.grads, *off.copies), strict=True
            ):
                for (name, box, values), (name_, box_, values_) in zip(ours, others, strict=True):
                    assert (name, box) == (name_, box_)
                    assert (values == values_).all(), f"{case.name}: {name}"
