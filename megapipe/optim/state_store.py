"""Where the master weights and the optimizer state of a shard live, and in what type.

Resident fp32 state is used in place. Anything else (bf16, in host memory, on a disk) passes
through windows of a bounded size (:mod:`megapipe.optim.offload`), and the rule that updates it
need not know.
"""

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
from megapipe.optim.offload import CopyStream, Staging, StateArray, StateDevice
from megapipe.optim.rounding import round_at_random, scratch_bytes

MASTER = "model"
"""Name of the master weights among the states."""
VELOCITY = "stream.velocity"
"""Name of a state that no rule has; see :mod:`megapipe.optim.velocity`."""
ALIGNMENT = 64
"""Windows begin at multiples of this many values, so that vector instructions cut them alike."""
MIB = 1 << 20


@dataclass(frozen=True)
class StatePolicy:
    """How the state of all shards of a process is kept."""

    master: Literal["fp32", "none"] = "fp32"
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    place: StateDevice = "device"
    folder: Path | None = None
    window_bytes: int = 64 * MIB
    seed: int = 0
    separate_masters: bool = False
    """Masters are copies also of weights of their type, which are then others: predicted ones, or
    one of several versions."""

    @classmethod
    def of(
        cls, config: OptimizerConfig, seed: int, run_folder: Path, device: torch.device
    ) -> StatePolicy:
        """The policy of a run; :class:`ConfigError` for windows too small for random rounding."""
        least = 2 * scratch_bytes(device) / MIB
        narrow = config.state_dtype == "bf16" or config.master == "none"
        if narrow and config.rounding == "stochastic" and config.window_mib < least:
            raise ConfigError(
                f"optimizer.window_mib={config.window_mib:g}: random numbers for rounding take "
                f"{least / 2:g} of it on this device; expected at least {least:g}"
            )
        folder = run_folder if config.offload_folder is None else Path(config.offload_folder)
        return cls(
            master=config.master,
            state_dtype=config.state_dtype,
            rounding=config.rounding,
            place="device" if config.offload == "none" else config.offload,
            folder=folder,
            window_bytes=int(config.window_mib * MIB),
            seed=seed,
            separate_masters=config.look_ahead != 0,
        )


class StateWindow(NamedTuple):
    """A range [start, stop) of a shard, to be updated in place.

    All tensors are [stop - start], fp32 (fp64 in an fp64 model).
    """

    start: int
    stop: int
    master: Tensor
    states: tuple[Tensor, ...]
    """In the order of the store's names."""


class StateBytes(NamedTuple):
    """Memory of a store between updates, weights not counted, and of its windows during one."""

    device: int
    host: int
    disk: int
    windows: int


def copy_into(target: Tensor, values: Tensor) -> None:
    """Copy, unless the values are there already."""
    if values.data_ptr() != target.data_ptr():
        target.copy_(values)


class StateStore:
    """Master weights and states `names` of a shard, whose `weights` [n] are in the model dtype.

    fp32 and fp64 weights are their own masters, unless the policy keeps them apart:
    ``read("model", ...)`` is a view of them. Other masters are copies, from which the weights are
    set. `bucket` and `start` say where in the model the shard begins: random numbers depend on it,
    not on how shards are cut. With `velocity` there is one more state, in the type of masters,
    which updates do not see.
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
        """0 where the last update left finite masters and states, else NaN; fp64 []."""
        self.kept: list[Tensor] = []
        """Master and states as of the last :meth:`snapshot`."""
        self.own_master: bool = self.policy.separate_masters or (
            weights.dtype != self._main and self.policy.master == "fp32"
        )
        """Whether masters have memory of their own, and the weights are set from them."""
        master = self._array(MASTER, self._main, given=None if self.own_master else weights)
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

    def _array(self, name: str, dtype: torch.dtype, given: Tensor | None = None) -> StateArray:
        return StateArray(
            name,
            self.weights.numel(),
            dtype,
            self._main,
            self.weights.device,
            "device" if given is not None else self.policy.place,
            folder=self.policy.folder,
            given=given,
        )

    @property
    def states(self) -> tuple[str, ...]:
        """Names of all that is kept beside masters."""
        return tuple(name for name in self._named if name != MASTER)

    @property
    def _at_random(self) -> bool:
        return self.policy.rounding == "stochastic" and any(x.narrow for x in self._arrays)

    @property
    def _scratch_bytes(self) -> int:
        return scratch_bytes(self.weights.device) if self._at_random else 0

    def _window_length(self) -> int | None:
        """Values of a window; None: everything is used in place."""
        each = sum(array.staging_bytes for array in self._arrays)
        if each == 0:
            return None
        budget = self.policy.window_bytes - self._scratch_bytes
        return max(budget // each // ALIGNMENT, 1) * ALIGNMENT

    def begin(self, step: int) -> None:
        """Begin an update: rounding draws the random numbers of `step`, counted from 0, and files
        read since the last update leave memory."""
        self._step = step
        self.finite = 0.0
        self.release(0, self.weights.numel())

    def release(self, start: int, stop: int) -> None:
        """Let files that hold the values [start, stop) leave memory."""
        for array in self._named.values():
            array.release(start, stop)

    def windows(self, start: int, stop: int) -> Iterator[StateWindow]:
        """The range [start, stop) of the shard, in windows.

        When the iteration goes on, the values of the window are stored, and the weights are set
        from the master. Whether they are finite is noted (:attr:`finite`).
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
        """Set the weights from an updated window's master, and look whether all is finite."""
        values = [master, *states]
        if self.own_master:
            weights = self.weights[start:stop].copy_(master)
            if weights.dtype == torch.float16:  # which holds less than its master
                values.append(weights)
        self.finite = self.finite + zero_if_finite(values)

    def _ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """[start, stop) in pieces of a window's length."""
        length = self._window or max(stop - start, 1)
        return [(a, min(a + length, stop)) for a in range(start, stop, length)]

    def _narrow(self, name: str, out: Tensor, wide: Tensor, start: int) -> None:
        """Round values, of which the first stands at `start` of the shard."""
        if not self._at_random:
            out.copy_(wide)
            return
        assert self._step is not None, "stochastic rounding needs StateStore.begin(step)"
        stream = (self.policy.seed, "rounding", self._step, self._bucket, name)
        round_at_random(out, wide, stream, self._origin + start)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """The values [start, stop) of a state, or of the master weights ("model").

        A view of what is kept, in the type and on the device where it is: later updates change it.
        """
        array = self._named[name]
        self._settle(array)
        return array.values[start:stop]

    def in_place(self, name: str, start: int, stop: int) -> Tensor | None:
        """The values [start, stop) of a state if they are in host memory, in the type of masters
        and where an update reads them: what is filled in there needs no :meth:`write`."""
        array = self._named[name]
        elsewhere = array.is_offloaded or array.narrow or self.weights.device.type != "cpu"
        if elsewhere or (name == MASTER and self.own_master):
            return None
        return self.read(name, start, stop)

    def write(self, name: str, start: int, stop: int, values: Tensor) -> None:
        """Set the values [start, stop) of a state, or of the master weights and the weights.

        Values of a wider type than is kept are rounded to the nearest.
        """
        array = self._named[name]
        self._settle(array)
        copy_into(array.values[start:stop], values)
        array.release(start, stop)
        if name == MASTER and self.own_master:
            self.weights[start:stop].copy_(values)

    def snapshot(self) -> None:
        """Remember all values, for :meth:`restore`. State must be on the device."""
        assert self.policy.place == "device"
        if not self.kept:
            self.kept = [torch.empty_like(array.values) for array in self._arrays]
        for copy, array in zip(self.kept, self._arrays, strict=True):
            copy.copy_(array.values)

    def restore(self) -> None:
        """Put all values back, bitwise, to what :meth:`snapshot` saw."""
        for copy, array in zip(self.kept, self._arrays, strict=True):
            array.values.copy_(copy)
        if self.own_master:
            self.weights.copy_(self.kept[0])
        self.finite = 0.0

    def _settle(self, array: StateArray) -> None:
        """Wait for copies to and from the host, which the computation waits for."""
        if array.is_offloaded and self.weights.is_cuda:
            torch.cuda.current_stream(self.weights.device).synchronize()

    def nbytes(self) -> StateBytes:
        """Bytes that are kept, and the most that an update adds."""
        places = dict.fromkeys(("device", "host", "disk"), 0)
        for array in self._named.values():
            if array.values is not self.weights:
                places[array.place] += array.values.nbytes
        values = min(self._window or 0, self.weights.numel())
        windows = values * sum(array.staging_bytes for array in self._arrays)
        if values:
            windows += self._scratch_bytes
        return StateBytes(**places, windows=windows)
