"""Wherever state lives and in whatever windows it passes, an update is the plain update."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megapipe.config.config import Config, OptimizerConfig
from megapipe.errors import ConfigError, MegapipeError
from megapipe.layout.resolve import resolve
from megapipe.optim import state_store
from megapipe.optim.rounding import round_at_random, scratch_bytes
from megapipe.optim.state_offload import LANES, MappedFile
from megapipe.optim.state_store import MIB, StatePolicy, StateStore

CPU = torch.device("cpu")
NAMES = ("exp_avg", "exp_avg_sq")
N = 200
SEGMENTS = ((0, 60), (60, 200))
BUCKET, START = 3, 70_000
ONE_SUM = 4
"""Bytes of the sum by which a window's values are looked at."""


def rule(master: Tensor, states: tuple[Tensor, ...], grad: Tensor) -> None:
    """Update by Adam without bias correction, in place."""
    first, second = states
    first.mul_(0.9).add_(grad * 0.1)
    second.mul_(0.95).add_(grad * grad * 0.05)
    master.sub_(0.01 * first / (second.sqrt() + 1e-6))


def gradient(step: int, dtype: torch.dtype, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(step), dtype=dtype)


def initial(dtype: torch.dtype, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(99)).to(dtype)


def update(store: StateStore, step: int) -> int:
    """Take one step and return the number of windows."""
    store.begin(step)
    grad = gradient(step, torch.promote_types(store.weights.dtype, torch.float32))
    seen = 0
    for start, stop in SEGMENTS:
        at = start
        for window in store.windows(start, stop):
            assert window.start == at
            assert window.master.shape == (window.stop - at,)
            assert all(t.dtype == grad.dtype for t in (window.master, *window.states))
            rule(window.master, window.states, grad[at : window.stop])
            at = window.stop
            seen += 1
        assert at == stop
    return seen


class Plain:
    """A plain optimizer of whole tensors, which are rounded after each step."""

    def __init__(self, dtype: torch.dtype, policy: StatePolicy) -> None:
        self.dtype, self.policy = dtype, policy
        main = torch.promote_types(dtype, torch.float32)
        self.weights = initial(dtype)
        self.values = {"model": self.weights.to(main)}
        self.values |= {name: torch.zeros(N, dtype=main) for name in NAMES}

    def update(self, step: int) -> None:
        master, *states = self.values.values()
        rule(master, tuple(states), gradient(step, master.dtype))
        self.weights = master.to(self.dtype)
        if self.policy.master == "none":
            self._round("model", step)
            self.weights = master.to(self.dtype)
        if self.policy.state_dtype == "bf16":
            for name in NAMES:
                self._round(name, step)

    def _round(self, name: str, step: int) -> None:
        values = self.values[name]
        out = values.bfloat16()
        if self.policy.rounding == "stochastic":
            stream = (self.policy.seed, "rounding", step, BUCKET, name)
            round_at_random(out, values, stream, START)
        values.copy_(out)


KINDS = [
    (dtype, StatePolicy(master=master, state_dtype=state, rounding=rounding, place=place, seed=5))
    for dtype, master, state, rounding, place in product(
        (torch.float64, torch.float32, torch.bfloat16, torch.float16),
        ("fp32", "none"),
        ("fp32", "bf16"),
        ("nearest", "stochastic"),
        ("device", "host", "disk"),
    )
    if (master == "fp32" or dtype == torch.bfloat16)
    and (state == "fp32" or dtype != torch.float64)
    and (rounding == "nearest" or master == "none" or state == "bf16")
]


def name_of(value: Any) -> str:
    if isinstance(value, StatePolicy):
        return f"{value.master}-{value.state_dtype}-{value.rounding}-{value.place}"
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("window", [0, 64 * MIB], ids=["windows", "one"])
@pytest.mark.parametrize(("dtype", "policy"), KINDS, ids=name_of)
def test_updates_are_those_of_plain_tensors(
    dtype: torch.dtype, policy: StatePolicy, window: int, tmp_path: Path
) -> None:
    """Bitwise, also after a checkpoint half-way."""
    policy = replace(policy, folder=tmp_path, window_bytes=window)
    plain = Plain(dtype, policy)
    store = StateStore(initial(dtype), NAMES, policy, bucket=BUCKET, start=START)
    in_place = store.nbytes().windows == 0
    for step in range(4):
        assert update(store, step) == (2 if in_place or window else 4)
        plain.update(step)
        assert store.weights.equal(plain.weights)
        for name, values in plain.values.items():
            assert store.read(name, 10, 170).to(values.dtype).equal(values[10:170]), name
        if step == 1:
            again = StateStore(
                torch.zeros(N, dtype=dtype), NAMES, policy, bucket=BUCKET, start=START
            )
            for name in plain.values:
                for a, b in ((0, 111), (111, N)):
                    again.write(name, a, b, store.read(name, a, b).clone())
            store = again


def test_the_plan_of_a_resident_store_costs_nothing() -> None:
    """fp32 weights are their own masters, and windows are what is kept."""
    weights = initial(torch.float32)
    store = StateStore(weights, NAMES)
    (window,) = store.windows(10, 20)
    assert window.master.data_ptr() == weights[10:].data_ptr()
    for name, state in zip(NAMES, window.states, strict=True):
        assert state.data_ptr() == store.read(name, 10, 20).data_ptr()
    assert list(store.windows(5, 5)) == []


def test_shards_round_as_the_whole_does() -> None:
    """Random numbers belong to places in the bucket, not to owners of slices."""
    policy = StatePolicy(master="none", state_dtype="bf16", window_bytes=0)
    grad = gradient(0, torch.float32)
    results = []
    for cuts in ((0, N), (0, 33, 150, N)):
        weights = initial(torch.bfloat16)
        states = []
        for a, b in pairwise(cuts):
            store = StateStore(weights[a:b], NAMES, policy, bucket=BUCKET, start=a)
            store.begin(7)
            for window in store.windows(0, b - a):
                rule(window.master, window.states, grad[a:b][window.start : window.stop])
            states.append(store.read("exp_avg", 0, b - a))
        results.append((weights, torch.cat(states)))
    assert results[0][0].equal(results[1][0])
    assert results[0][1].equal(results[1][1])


def test_steps_buckets_and_seeds_round_differently() -> None:
    def rounded(step: int = 0, bucket: int = 0, seed: int = 0) -> Tensor:
        policy = StatePolicy(state_dtype="bf16", seed=seed)
        store = StateStore(torch.zeros(N), ("a", "b"), policy, bucket=bucket)
        store.begin(step)
        for window in store.windows(0, N):
            for state in window.states:
                state.fill_(1 + 2.0**-8)
        assert not store.read("a", 0, N).equal(store.read("b", 0, N))
        return store.read("a", 0, N).clone()

    variants = [rounded(), rounded(step=1), rounded(bucket=1), rounded(seed=1)]
    assert rounded().equal(variants[0])
    assert all(not a.equal(b) for i, a in enumerate(variants) for b in variants[:i])


def test_a_second_pass_that_changes_nothing_rounds_nothing() -> None:
    store = StateStore(
        initial(torch.bfloat16), NAMES, StatePolicy(master="none", state_dtype="bf16")
    )
    update(store, 0)
    before = [store.read(name, 0, N).clone() for name in ("model", *NAMES)]
    store.begin(1)
    for _ in store.windows(0, N):
        pass
    for name, values in zip(("model", *NAMES), before, strict=True):
        assert store.read(name, 0, N).equal(values)


def test_rounding_at_random_needs_its_step() -> None:
    store = StateStore(torch.zeros(N), NAMES, StatePolicy(state_dtype="bf16"))
    with pytest.raises(AssertionError, match="begin"):
        list(store.windows(0, N))


def test_a_policy_from_the_configuration(tmp_path: Path) -> None:
    config = OptimizerConfig(
        offload="disk", state_dtype="bf16", state_window_mib=16, rounding="nearest"
    )
    assert StatePolicy.of(config, 3, tmp_path, CPU) == StatePolicy(
        "fp32", "bf16", "nearest", "disk", tmp_path, 16 * MIB, 3
    )
    config = OptimizerConfig(offload_folder="/fast")
    assert StatePolicy.of(config, 0, tmp_path, CPU).folder == Path("/fast")
    assert StatePolicy.of(OptimizerConfig(), 0, tmp_path, CPU).place == "device"


@pytest.mark.parametrize(
    ("dtype", "settings", "expected"),
    [
        (torch.float32, {}, (8, 0, 0, 0)),
        (torch.float64, {}, (16, 0, 0, 0)),
        (torch.bfloat16, {}, (12, 0, 0, 0)),
        (torch.bfloat16, {"master": "none"}, (8, 0, 0, 4)),
        (torch.bfloat16, {"state_dtype": "bf16"}, (8, 0, 0, 8)),
        (torch.bfloat16, {"state_dtype": "bf16", "master": "none"}, (4, 0, 0, 12)),
        (torch.float32, {"place": "host"}, (0, 8, 0, 16)),
        (torch.float16, {"place": "host"}, (0, 12, 0, 24)),
        (torch.bfloat16, {"place": "disk", "state_dtype": "bf16"}, (0, 0, 8, 24)),
    ],
)
def test_bytes_by_formula(
    dtype: torch.dtype, settings: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    """Bytes per value are those on the device, in host memory, on the disk, in a window."""
    policy = StatePolicy(**settings, rounding="nearest", folder=tmp_path)
    assert LANES == 2
    assert StateStore(initial(dtype), NAMES, policy).nbytes() == tuple(N * b for b in expected)


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made within, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if _is_tensor(leaf)}
        out = func(*args, **(kwargs or {}))
        for leaf in filter(_is_tensor, tree_leaves(out)):
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key in given or key in self._known:
                continue
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, storage.nbytes())
        return out

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


@pytest.mark.parametrize(
    "settings",
    [
        {"place": "host"},
        {"place": "disk"},
        {"state_dtype": "bf16", "rounding": "nearest"},
        {"state_dtype": "bf16", "rounding": "stochastic"},
        {"state_dtype": "bf16", "rounding": "stochastic", "place": "host"},
        {"state_dtype": "bf16", "master": "none", "place": "disk"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_windows_keep_to_their_budget(settings: dict[str, Any], tmp_path: Path) -> None:
    """Counted from the tensors that are alive, for 18 MiB and more of state."""
    n, budget = 3 * MIB, 8 * MIB
    policy = StatePolicy(**settings, folder=tmp_path, window_bytes=budget)
    store = StateStore(torch.zeros(n, dtype=torch.bfloat16), NAMES, policy)
    store.begin(0)
    live = LiveBytes()
    count = 0
    with live:
        for window in store.windows(0, n):
            window.master.add_(1)
            window.states[0].add_(1)
            count += 1
            del window
    assert count >= 3
    assert live.now == 0
    promised = store.nbytes().windows
    assert promised <= budget
    at_random = settings.get("rounding", "stochastic") == "stochastic"
    scratch = scratch_bytes(store.weights.device) if at_random else 0
    assert promised - scratch <= live.peak <= promised + ONE_SUM
    assert store.weights.eq(1).all()
    assert store.read("exp_avg", 0, n).eq(1).all()
    assert store.read("exp_avg_sq", 0, n).eq(0).all()


def test_a_window_that_random_numbers_would_fill_is_refused(tmp_path: Path) -> None:
    config = OptimizerConfig(state_dtype="bf16", state_window_mib=32)
    assert StatePolicy.of(config, 1, tmp_path, CPU).window_bytes == 32 * MIB
    wanted = r"window_mib=32: .* take 32 of it on this device; expected at least 64"
    with pytest.raises(ConfigError, match=wanted):
        StatePolicy.of(config, 1, tmp_path, torch.device("cuda"))
    nearest = config.model_copy(update={"rounding": "nearest"})
    StatePolicy.of(nearest, 1, tmp_path, torch.device("cuda"))


def resident() -> int:
    """Return the bytes of this process that are in memory, without freed ones that the allocator
    keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem")) * 1024


def most_resident(folder: Path, window: int) -> int:
    """Return the most memory that the process gains in updates of a store of 48 MiB."""
    n = 4 * MIB
    weights = torch.ones(n, dtype=torch.bfloat16)
    policy = StatePolicy(place="disk", folder=folder, window_bytes=window, rounding="nearest")
    gc.collect()
    before, most = resident(), 0
    store = StateStore(weights, NAMES, policy)
    assert store.nbytes().disk == 48 * MIB
    for step in range(2):
        store.read("exp_avg", 0, n).sum()  # a checkpoint
        store.begin(step)
        most = max(most, resident() - before)
        for window in store.windows(0, n):
            window.master.add_(1)
            for state in window.states:
                state.add_(1)
            most = max(most, resident() - before)
        most = max(most, resident() - before)
    assert store.weights.eq(3).all()
    for a in range(0, n, MIB // 4):
        assert store.read("exp_avg_sq", a, a + MIB // 4).eq(2).all()
    return most


@pytest.mark.full
def test_state_on_a_disk_does_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slack = 2 * MIB
    """Pages of code and small tensors."""
    most_resident(tmp_path, 2 * MIB)  # touches pages of code for the first time
    for window in (2 * MIB, 16 * MIB):
        assert most_resident(tmp_path, window) <= window + slack
    monkeypatch.setattr(MappedFile, "release", lambda self, start, stop: None)
    assert most_resident(tmp_path, 2 * MIB) >= 44 * MIB, "the measure sees mapped memory"


def mapped(folder: Path) -> Iterator[str]:
    with open("/proc/self/maps") as file:
        yield from (line for line in file if str(folder) in line)


def test_files_have_no_name_and_go_with_the_store(tmp_path: Path) -> None:
    """A killed run leaves nothing behind, and a new one picks up nothing that lies there."""
    folder = tmp_path / "not" / "there" / "yet"
    store = StateStore(
        torch.ones(N, dtype=torch.bfloat16), NAMES, StatePolicy(place="disk", folder=folder)
    )
    assert len(list(mapped(folder))) == 3
    assert all("(deleted)" in line for line in mapped(folder))
    store.begin(0)
    for _ in store.windows(0, N):
        assert os.listdir(folder) == []
    assert store.read("exp_avg", 0, N).eq(0).all()
    del store
    gc.collect()
    assert list(mapped(folder)) == []
    assert os.listdir(folder) == []


def a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file"


@pytest.mark.parametrize(
    ("folder", "nbytes", "reason"),
    [
        (lambda path: path, 1 << 50, "No space left on device|File too large"),
        (lambda path: a_file(path), 10, "File exists|Not a directory"),
        (lambda path: a_file(path) / "sub", 10, "Not a directory"),
        (lambda path: Path("/proc/self"), 10, ".+"),
    ],
    ids=["full", "file", "below a file", "not writable"],
)
def test_a_disk_that_cannot_take_it_is_one_clear_line(
    folder: Callable[[Path], Path], nbytes: int, reason: str, tmp_path: Path
) -> None:
    where = folder(tmp_path)
    with pytest.raises(MegapipeError) as caught:
        MappedFile(where, nbytes)
    line = rf"cannot make a file of {nbytes:,} bytes in {where} \(optimizer.offload_folder\): "
    assert re.fullmatch(rf"optimizer\.offload=disk: {line}({reason})", str(caught.value))


@pytest.mark.parametrize(
    ("dtype", "settings", "message"),
    [
        (
            "fp16",
            {"master_weights": "none"},
            r"optimizer\.master_weights=none is for model\.dtype=bf16, not fp16",
        ),
        (
            "fp32",
            {"master_weights": "none"},
            r"optimizer\.master_weights=none is for model\.dtype=bf16, not fp32",
        ),
        ("fp64", {"state_dtype": "bf16"}, r"=bf16 is not possible with model\.dtype=fp64"),
        ("bf16", {"loss_scale": 8.0}, r"loss_scale=8\.0 has no effect without model\.dtype=fp16"),
    ],
)
def test_kinds_that_no_model_can_use_are_refused(
    dtype: str, settings: dict[str, Any], message: str
) -> None:
    config = {"model": {"dtype": dtype}, "optimizer": settings}
    with pytest.raises(ConfigError, match=message):
        resolve(Config.model_validate(config), 1, None)


class Late(TorchDispatchMode):
    """Copies within are put off."""

    def __init__(self, queue: list[Callable[[], Any]]) -> None:
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.queue.append(lambda: func(*args))
        return args[0]


class LateCopies:
    """A copying stream that works, in order, only when it is waited for."""

    heeds_marks = True

    def __init__(self, device: torch.device) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.done = 0

    def begin(self) -> Late:
        return Late(self.queue)

    def record_event(self) -> int:
        return len(self.queue)

    def wait_event(self, mark: int) -> None:
        if self.heeds_marks:
            for copy in self.queue[self.done : mark]:
                copy()
            self.done = max(self.done, mark)

    def wait_compute(self) -> None:
        pass

    def compute_waits(self) -> None:
        for copy in self.queue[self.done :]:
            copy()
        self.queue, self.done = [], 0


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_late_copies_change_nothing_as_long_as_they_are_waited_for(
    state_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a device's copying stream may do, at its slowest."""
    policy = StatePolicy(state_dtype=state_dtype, place="host", window_bytes=0, rounding="nearest")
    plain = Plain(torch.bfloat16, policy)
    monkeypatch.setattr(state_store, "CopyStream", LateCopies)
    store = StateStore(initial(torch.bfloat16), NAMES, policy, bucket=BUCKET, start=START)
    for step in range(3):
        update(store, step)
        plain.update(step)
    assert store.weights.equal(plain.weights)
    for name, values in plain.values.items():
        assert store.read(name, 0, N).to(values.dtype).equal(values), name
    monkeypatch.setattr(LateCopies, "heeds_marks", False)
    update(store, 3)
    plain.update(3)
    assert not store.weights.equal(plain.weights), "copies were late indeed"
