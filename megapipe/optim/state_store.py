"""Storage of a shard's master weights and optimizer state.

fp32 state on the device is updated in place. Any other state (bf16, in host memory, on a disk) is
copied for updates, in state windows of bounded size (:mod:`megapipe.optim.state_offload`). The
update rule does not notice it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megapipe.config.config import OptimizerConfig
from megapipe.errors import ConfigError
from megapipe.optim.norm import zero_if_finite
from megapipe.optim.rounding import round_at_random, scratch_bytes
from megapipe.optim.state_offload import CopyStream, Staging, StateArray, StateDevice

MASTER = "model"
"""Name of the master weights among the states."""
VELOCITY = "stream.velocity"
"""Name of the weights' velocity among the states; see :mod:`megapipe.optim.velocity`."""
ALIGNMENT = 64
"""Number of values of which each state window's start is a multiple, so that vector instructions
divide all windows in the same way."""
MIB = 1 << 20


@dataclass(frozen=True)
class StatePolicy:
    """How the state of all shards of a process is stored."""

    master: Literal["fp32", "none"] = "fp32"
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    place: StateDevice = "device"
    folder: Path | None = None
    window_bytes: int = 64 * MIB
    seed: int = 0
    separate_masters: bool = False
    """Whether masters have separate memory even if weights have the same number type. Needed if a
    stage computes with other values than the masters: predicted weights, or other versions."""

    @classmethod
    def of(
        cls, config: OptimizerConfig, seed: int, run_folder: Path, device: torch.device
    ) -> StatePolicy:
        """Make the policy of a run. Raises :class:`ConfigError` if state windows are too small."""
        least = 2 * scratch_bytes(device) / MIB
        narrow = config.state_dtype == "bf16" or config.master_weights == "none"
        if narrow and config.rounding == "stochastic" and config.state_window_mib < least:
            raise ConfigError(
                f"optimizer.state_window_mib={config.state_window_mib:g}: random numbers for "
                f"rounding take {least / 2:g} of it on this device; expected at least {least:g}"
            )
        folder = run_folder if config.offload_folder is None else Path(config.offload_folder)
        return cls(
            master=config.master_weights,
            state_dtype=config.state_dtype,
            rounding=config.rounding,
            place="device" if config.offload == "none" else config.offload,
            folder=folder,
            window_bytes=int(config.state_window_mib * MIB),
            seed=seed,
            separate_masters=config.weight_prediction != 0,
        )


class StateWindow(NamedTuple):
    """Masters and states of a range [start, stop) of a shard, to be updated in place.

    All tensors are [stop - start], fp32 (fp64 in an fp64 model).
    """

    start: int
    stop: int
    master: Tensor
    states: tuple[Tensor, ...]
    """Optimizer states, in the order of the store's names."""


class StateBytes(NamedTuple):
    """Bytes of a store between updates, by location and without weights; `windows` has the bytes
    that state windows add during an update."""

    device: int
    host: int
    disk: int
    windows: int


def copy_into(target: Tensor, values: Tensor) -> None:
    """Copy `values` into `target`, unless both are the same memory."""
    if values.data_ptr() != target.data_ptr():
        target.copy_(values)


class StateStore:
    """Stores masters and the states `names` of a shard of `weights` [n] in the model dtype.

    fp32 and fp64 weights are their own masters, unless the policy separates them: ``read("model",
    ...)`` is a view of them. Separate masters have their own memory, and weights are set from them.
    `bucket` and `start` locate the shard in the model: random numbers depend on this location, not
    on how buckets are sharded. With `velocity`, one more state in the type of masters is stored,
    which update rules do not see.
    """

    def __init__(
        self,
        weights: Tensor,
        names: Sequence[str],
        policy: StatePolicy | None = None,
        *,
        bucket: int = 0,
        start: int = 0,
        velocity: bool = False,
    ) -> None:
        self.policy = policy or StatePolicy()
        self.weights = weights
        self._main = torch.promote_types(weights.dtype, torch.float32)
        self._bucket = bucket
        self._origin = start
        self._step: int | None = None
        self.finite: Tensor | float = 0.0
        """0 if the last update left finite masters and states, else NaN; fp64 []."""
        self.kept: list[Tensor] = []
        """Masters and states at the last :meth:`snapshot`."""
        self.own_master: bool = self.policy.separate_masters or (
            weights.dtype != self._main and self.policy.master == "fp32"
        )
        """Whether masters have separate memory, from which weights are set."""
        master = self._array(MASTER, self._main, existing=None if self.own_master else weights)
        narrow = self.policy.state_dtype == "bf16"
        dtype = torch.bfloat16 if narrow else self._main
        self._arrays = [master, *(self._array(name, dtype) for name in names)]
        beside = [self._array(VELOCITY, self._main)] if velocity else []
        self._named = {array.name: array for array in (*self._arrays, *beside)}
        self._window = self._window_length()
        away = any(array.is_offloaded for array in self._arrays)
        self._copies = CopyStream(weights.device if away else torch.device("cpu"))
        if self.own_master:
            for a, b in self._ranges(0, weights.numel()):
                self.write(MASTER, a, b, weights[a:b])

    def _array(self, name: str, dtype: torch.dtype, existing: Tensor | None = None) -> StateArray:
        return StateArray(
            name,
            self.weights.numel(),
            dtype,
            self._main,
            self.weights.device,
            "device" if existing is not None else self.policy.place,
            folder=self.policy.folder,
            existing=existing,
        )

    @property
    def states(self) -> tuple[str, ...]:
        """Names of all stored arrays except the masters."""
        return tuple(name for name in self._named if name != MASTER)

    @property
    def _at_random(self) -> bool:
        return self.policy.rounding == "stochastic" and any(x.narrow for x in self._arrays)

    @property
    def _scratch_bytes(self) -> int:
        return scratch_bytes(self.weights.device) if self._at_random else 0

    def _window_length(self) -> int | None:
        """Return the number of values in a state window; None if all state is updated in place."""
        each = sum(array.staging_bytes for array in self._arrays)
        if each == 0:
            return None
        budget = self.policy.window_bytes - self._scratch_bytes
        return max(budget // each // ALIGNMENT, 1) * ALIGNMENT

    def begin(self, step: int) -> None:
        """Begin the update of `step`, counted from 0, which seeds stochastic rounding. Release
        cached memory of state files that were read since the previous update."""
        self._step = step
        self.finite = 0.0
        self.release(0, self.weights.numel())

    def release(self, start: int, stop: int) -> None:
        """Release the memory that caches the values [start, stop) of state files."""
        for array in self._named.values():
            array.release(start, stop)

    def windows(self, start: int, stop: int) -> Iterator[StateWindow]:
        """Yield the state of the range [start, stop) of the shard, window by window.

        When the iteration continues, the previous window's values are stored, and weights are set
        from masters. :attr:`finite` records whether the values are finite.
        """
        if self._window is None and start < stop:
            master, *states = (array.values[start:stop] for array in self._arrays)
            yield StateWindow(start, stop, master, tuple(states))
            self._set_weights(start, stop, master, states)
            return
        ranges = self._ranges(start, stop)
        staging = Staging(self._arrays, ranges, self.weights.device, self._copies)
        try:
            staging.fetch(0)
            for index, (a, b) in enumerate(ranges):
                staging.fetch(index + 1)
                master, *states = staging.widen(index)
                yield StateWindow(a, b, master, tuple(states))
                self._set_weights(a, b, master, states)
                staging.write_back(index, self._narrow)
        finally:
            staging.end()

    def _set_weights(self, start: int, stop: int, master: Tensor, states: Sequence[Tensor]) -> None:
        """Set the weights from an updated window's master, and check that all values are finite."""
        values = [master, *states]
        if self.own_master:
            weights = self.weights[start:stop].copy_(master)
            if weights.dtype == torch.float16:  # its range is smaller than the master's
                values.append(weights)
        self.finite = self.finite + zero_if_finite(values)

    def _ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Divide [start, stop) into state windows."""
        length = self._window or max(stop - start, 1)
        return [(a, min(a + length, stop)) for a in range(start, stop, length)]

    def _narrow(self, name: str, out: Tensor, wide: Tensor, start: int) -> None:
        """Round `wide`, the shard's values from position `start` on, into `out`."""
        if not self._at_random:
            out.copy_(wide)
            return
        assert self._step is not None, "stochastic rounding needs StateStore.begin(step)"
        stream = (self.policy.seed, "rounding", self._step, self._bucket, name)
        round_at_random(out, wide, stream, self._origin + start)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return the values [start, stop) of a state, or of the master weights ("model").

        The result is a view of the stored array, in its type and on its device: updates change it.
        """
        array = self._named[name]
        self._settle(array)
        return array.values[start:stop]

    def in_place(self, name: str, start: int, stop: int) -> Tensor | None:
        """Return a view of a state's values [start, stop), to write into instead of calling
        :meth:`write`. Return None for values that are offloaded, on a GPU or of a narrower type,
        and for separate masters."""
        array = self._named[name]
        elsewhere = array.is_offloaded or array.narrow or self.weights.device.type != "cpu"
        if elsewhere or (name == MASTER and self.own_master):
            return None
        return self.read(name, start, stop)

    def write(self, name: str, start: int, stop: int, values: Tensor) -> None:
        """Set the values [start, stop) of a state, or of the masters and with them the weights.

        Values of a wider type than the stored one are rounded to nearest.
        """
        array = self._named[name]
        self._settle(array)
        copy_into(array.values[start:stop], values)
        array.release(start, stop)
        if name == MASTER and self.own_master:
            self.weights[start:stop].copy_(values)

    def snapshot(self) -> None:
        """Save all values for :meth:`restore`. State must be on the device."""
        assert self.policy.place == "device"
        if not self.kept:
            self.kept = [torch.empty_like(array.values) for array in self._arrays]
        for copy, array in zip(self.kept, self._arrays, strict=True):
            copy.copy_(array.values)

    def restore(self) -> None:
        """Restore all values, bitwise, to what :meth:`snapshot` saved."""
        for copy, array in zip(self.kept, self._arrays, strict=True):
            array.values.copy_(copy)
        if self.own_master:
            self.weights.copy_(self.kept[0])
        self.finite = 0.0

    def _settle(self, array: StateArray) -> None:
        """Make the host wait for the copies of an offloaded array. The compute stream already waits
        for these copies."""
        if array.is_offloaded and self.weights.is_cuda:
            torch.cuda.current_stream(self.weights.device).synchronize()

    def nbytes(self) -> StateBytes:
        """Return the stored bytes, and the maximum that state windows add during an update."""
        by_place = dict.fromkeys(("device", "host", "disk"), 0)
        for array in self._named.values():
            if array.values is not self.weights:
                by_place[array.place] += array.values.nbytes
        values = min(self._window or 0, self.weights.numel())
        windows = values * sum(array.staging_bytes for array in self._arrays)
        if values:
            windows += self._scratch_bytes
        return StateBytes(**by_place, windows=windows)
