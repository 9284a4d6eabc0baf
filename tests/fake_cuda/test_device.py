"""The device of type cuda itself: devices, tensors, memory, random numbers, waits of the host."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fake_cuda.world import faults_of, observe, run_world
from tests.parity.tiers import in_parts


def devices_seen(world: Any, visible: str | None) -> tuple[int, int, str]:
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(" ")[world.rank]
        torch.cuda.set_device(0)
    index = torch.cuda.current_device()
    return torch.cuda.device_count(), index, str(torch.cuda.get_device_properties(index).uuid)


@in_parts(
    ("visible", "count", "indices"),
    [(None, 8, (0, 1)), ("3 5", 1, (0, 0)), ("0,1 2,3", 2, (0, 0))],
)
def test_processes_tell_devices_apart(
    visible: str | None, count: int, indices: tuple[int, int]
) -> None:
    first, second = run_world(2, devices_seen, visible)
    assert first[0] == second[0] == count
    assert (first[1], second[1]) == indices
    assert first[2] != second[2]


def small_model(device: str) -> list[Tensor]:
    """Return loss and gradients of a model with the operations of a transformer."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (24, 8, 16)]
    weight, out, table = (x.to(device).requires_grad_() for x in weights)
    tokens = torch.randint(16, (2, 6), generator=generator).to(device)
    x = F.embedding(tokens, table)
    q, k, v = (F.rms_norm(x, (8,)) @ weight.t()).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).reshape(2, 6, 8) @ out.t()
    x = F.layer_norm(F.silu(x), (8,))
    loss = F.cross_entropy((x @ table.t()).flatten(0, 1), tokens.roll(1, 1).flatten())
    grads = torch.autograd.grad(loss, [weight, out, table])
    assert all(g.device == torch.device(device) for g in grads)
    return [loss.detach().cpu(), *(g.cpu() for g in grads)]


def on_device(world: Any) -> list[Any]:
    return [x.numpy() for x in small_model(f"cuda:{torch.cuda.current_device()}")]


@pytest.mark.full
def test_a_model_computes_what_it_computes_on_the_host() -> None:
    (found,) = run_world(1, on_device)
    for mine, expected in zip(found, small_model("cpu"), strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), expected, rtol=1e-12, atol=1e-14)


def mixed(world: Any) -> list[str]:
    """Collect the errors of operations that a GPU refuses too."""
    here, there = (torch.ones(3, device=f"cuda:{i}") for i in range(2))
    host = torch.ones(3)
    texts = []
    for left, right in ((here, host), (here, there)):
        with pytest.raises(RuntimeError, match="same device") as raised:
            left + right
        texts.append(str(raised.value))
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(8)
    with pytest.raises(RuntimeError, match="can be pinned"):
        here.pin_memory()
    with pytest.raises(TypeError, match="host memory"):
        here.numpy()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**50, device="cuda")
    assert (here * torch.tensor(2.0)).tolist() == [2, 2, 2], "numbers go along"
    return texts


def test_devices_are_not_mixed() -> None:
    ((host, other),) = run_world(1, mixed)
    assert "cuda:0 and cpu" in host
    assert "cuda:0 and cuda:1" in other


def memory(world: Any) -> None:
    """Check the device's memory: it is counted, starts and ends as NaN, and moves if a storage is
    resized."""
    before = torch.cuda.memory_allocated()
    x = torch.empty(1000, device="cuda")
    assert x.isnan().all()
    assert torch.cuda.memory_allocated() - before == 4000
    y = x.fill_(1) + 1
    assert torch.cuda.memory_allocated() - before == 8000
    storage = y.untyped_storage()
    storage.resize_(0)
    assert torch.cuda.memory_allocated() - before == 4000
    with pytest.raises(RuntimeError, match="illegal memory access"):
        y.add_(1)
    storage.resize_(4000)
    assert y.isnan().all()
    x.untyped_storage().resize_(8000)
    assert x.eq(1).all()
    torch.cuda.reset_peak_memory_stats()
    del x, y, storage
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before + 12000


def test_memory_of_the_device() -> None:
    run_world(1, memory)


def draws(world: Any) -> None:
    """Check that the device's random numbers do not depend on the host's."""
    torch.cuda.manual_seed(3)
    state, host = torch.cuda.get_rng_state(), torch.get_rng_state()
    first = [F.dropout(torch.ones(100, device="cuda")), torch.rand(5, device="cuda")]
    assert torch.get_rng_state().equal(host)
    assert not torch.cuda.get_rng_state().equal(state)
    torch.cuda.set_rng_state(state)
    again = [F.dropout(torch.ones(100, device="cuda")), torch.rand(5, device="cuda")]
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    generator = torch.Generator("cuda").manual_seed(9)
    torch.randn(5, device="cuda", generator=generator)
    assert not torch.get_rng_state().equal(torch.cuda.get_rng_state())


def test_random_numbers_of_the_device() -> None:
    run_world(1, draws)


def waits(world: Any) -> None:
    """Make the host wait; only the last lines do not."""
    x = torch.ones(4, device="cuda")
    x.sum().item()
    x.cpu()
    x.nonzero()
    x[x > 0]
    x[x > 0] = torch.zeros(4, device="cuda")
    x.equal(x)
    torch.tensor([1.0], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.current_stream().synchronize()
    torch.cuda.current_stream().record_event().synchronize()
    pinned = torch.zeros(4).pin_memory()
    x.copy_(pinned, non_blocking=True)
    pinned.copy_(x, non_blocking=True)
    torch.full((2,), 3.0, device="cuda")
    x.masked_fill_(x > 0, 1.0)


def test_waits_of_the_host_are_counted() -> None:
    _, (report,) = observe(1, waits)
    assert not faults_of([report])
    assert report.host_waits == {
        "aten::_local_scalar_dense": 1,
        "copy to the host": 1,
        "aten::nonzero": 2,  # a mask is one too
        "aten::_index_put_impl_": 1,
        "aten::equal": 1,
        "copy from the host": 1,
        "synchronize a device": 1,
        "synchronize a stream": 1,
        "synchronize an event": 1,
    }


def wider_products(world: Any) -> None:
    """Check products of narrow factors whose result is not rounded to their type."""
    left, right = (torch.randn(6, n, device="cuda").bfloat16() for n in (3, 4))
    exact = left.double().t() @ right.double()
    found = torch.mm(left.t(), right, out_dtype=torch.float32)
    assert (found - exact).abs().max() < 1e-5
    out = torch.ones(3, 4, device="cuda")
    torch.addmm(out, left.t(), right, out_dtype=torch.float32, out=out)
    assert (out - exact - 1).abs().max() < 1e-5


def test_products_that_are_wider_than_their_factors() -> None:
    run_world(1, wider_products)
