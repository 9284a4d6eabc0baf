"""The optimizer of one process: reduces, clips and applies the gradients of its buckets.

The pipeline's programs say when a stage's gradients are sent off and when its weights are needed
(:mod:`megapipe.schedule.data_parallel`). :mod:`megapipe.optim.shard` says what a bucket then does,
:mod:`megapipe.optim.rules` how a slice is updated.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.config.config import OptimizerConfig
from megapipe.distributed.mesh import Axis, ParallelMesh
from megapipe.layers.parameter import LocalParameter
from megapipe.layers.weight_replicas import WeightReplicas
from megapipe.ops.adam import AdamKernel, torch_adam
from megapipe.optim.buffers import Bucket, ParamRange
from megapipe.optim.departure import BucketLauncher
from megapipe.optim.filling import Fill, fill_parameters
from megapipe.optim.look_ahead import predict
from megapipe.optim.reduction import REDUCE_DTYPES
from megapipe.optim.rules import build_rule
from megapipe.optim.shard import Shard
from megapipe.optim.state_store import MASTER, StatePolicy
from megapipe.optim.velocity import followed
from megapipe.util.finite import all_finite
from megapipe.words import ranges


class OwnSlice(NamedTuple):
    """The range of a parameter that this rank owns: flat [start, stop) of its local region."""

    spec: LocalParameter
    start: int
    stop: int
    values: dict[str, Tensor]
    """"model" (the master weights), the states ("optimizer.exp_avg", ...) and older versions of the
    weights that are still read ("stash.1", ...), flat; of what is frozen the weights alone."""


class Optimizer:
    """Updates the weights of `buckets`, which are of the stages 0 .. `stages` - 1 and the tied one.

    The order of use in a step: :meth:`zero_grad`, the backward passes, during which the executor
    calls what :class:`~megapipe.engine.executor.DataParallelHooks` lists, :meth:`finish_reduce`,
    :meth:`update`. State is kept as `states` says; `kernel` does the steps of
    Adam. `velocity` has the decay of the velocity of weights, by stage, where one is kept.
    `replicas` are those of weights, by stage, in the order of layers.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        config: OptimizerConfig,
        mesh: ParallelMesh,
        stages: int,
        *,
        states: StatePolicy | None = None,
        kernel: AdamKernel = torch_adam,
        velocity: Mapping[int, float] | None = None,
        staleness: Mapping[int, float] | None = None,
        replicas: Mapping[int, Sequence[WeightReplicas]] | None = None,
    ) -> None:
        self.config = config
        self._staleness = staleness or {}
        self._velocity = velocity or {}
        self.replicas = dict(sorted((replicas or {}).items()))
        """By stage the replicas of weights of its layers."""
        self.mesh = mesh
        self.stages = stages
        self.rule = build_rule(config, kernel)
        self.count = 0
        """Steps that the states have seen."""
        self.lr = 0.0
        """Learning rate of the last of them."""
        self._kept = 0
        narrow = REDUCE_DTYPES[config.reduce_dtype]
        self.shards = [
            Shard(
                bucket,
                self._parts_of(bucket),
                self.rule.states,
                states,
                reduce_dtype=narrow,
                velocity=bucket.index in self._velocity,
            )
            for bucket in buckets
            if not bucket.frozen
        ]
        self.frozen = [
            Shard(bucket, mesh.tp, policy=StatePolicy(master="none"))
            for bucket in buckets
            if bucket.frozen
        ]
        """Of weights that stay as they are: their own masters, with no gradients and no states."""
        self._own: dict[int, BucketLauncher] = defaultdict(BucketLauncher)
        """Shards whose gradients are complete with one stage's; last, the tied one."""
        self._through: Counter[int] = Counter()
        """How often pipeline ranks of this process have completed a stage's gradients."""
        self._of_stage: dict[int, list[Shard]] = defaultdict(list)
        """Shards of all weights that a stage computes with, tied ones included."""
        self._reducing: list[int] = []
        """Stages with sharded gradients whose reduction is under way, the oldest first."""
        for shard in (*self.shards, *self.frozen):
            index = shard.bucket.index
            users = [index] if index < stages else [0, stages - 1]
            for stage in users:
                self._of_stage[stage].append(shard)
            if not shard.bucket.frozen:
                self._own[index].add(shard)

    def _parts_of(self, bucket: Bucket) -> Axis:
        """The ranks with other parts of a bucket's tensors, for rules that take these as wholes."""
        if not bucket.over_ep:
            return self.mesh.tp
        return Axis.alone(self.mesh.rank) if self.rule.declaration.elementwise else self.mesh.etp

    def zero_grad(self) -> None:
        """Begin a step with zero gradients; reductions that an aborted step left are dropped."""
        self._reducing.clear()
        self._through.clear()
        for own in self._own.values():
            own.begin()
        for shard in self.shards:
            shard.zero_grad()
        for replicas in self._all_replicas():
            replicas.zero_grad()

    def _all_replicas(self) -> Iterator[WeightReplicas]:
        """Yield them by stage and layer, the same on all ranks that share them."""
        return chain.from_iterable(self.replicas.values())

    def alloc_grads(self, stage: int) -> None:
        own = self._sharded(stage)
        # with those being added to, two stages at most have memory for gradients
        while own and (len(self._reducing) > 1 or stage in self._reducing):
            for shard in self._sharded(self._reducing.pop(0)):
                shard.finish_reduce()
        for shard in own:
            shard.bucket.alloc_grads()

    def _sharded(self, stage: int) -> list[Shard]:
        """The shards of a stage whose gradients are sharded (ZeRO-2, 3)."""
        return [shard for shard in self._own[stage].shards if shard.bucket.sharded_grads]

    def gradient_ready(
        self, stage: int, parameter: Parameter, waiting: Iterable[Parameter]
    ) -> None:
        self._own[stage].gradient_ready(parameter, waiting)

    def reduce(self, stage: int) -> None:
        own = self._own[stage].shards
        if not own:
            return
        self._through[stage] += 1
        if self._through[stage] % own[0].bucket.holders:
            return
        for earlier in self.shards:
            if earlier not in own:
                earlier.advance_reduction()
        if self._sharded(stage):
            self._reducing.append(stage)
        self._own[stage].launch_remaining()

    def unshard(self, stage: int) -> None:
        for shard in self._of_stage[stage]:
            shard.unshard()

    def wait_weights(self, stage: int) -> None:
        for shard in self._of_stage[stage]:
            shard.await_weights()
        for replicas in self.replicas.get(stage, ()):
            replicas.start_broadcast()

    def broadcast_expert_replicas(self) -> None:
        """After an update, send the weights that have replicas, if these have changed. All ranks
        call it. What owners have to gather first leaves in :meth:`wait_weights`."""
        for stage, of_stage in self.replicas.items():
            owners = (s.axis for s in self._of_stage[stage] if s.bucket.over_ep)
            if all(axis.size == 1 for axis in owners):
                for replicas in of_stage:
                    replicas.start_broadcast()

    def reshard(self, stage: int) -> None:
        for shard in self._of_stage[stage]:
            shard.reshard()

    def finish_reduce(self, loss_scale: float = 1.0) -> Tensor:
        """Complete the sum of the step's gradients over the replicas, and divide by `loss_scale`.

        Returns fp64 [stages + 1]: squared norms of the gradients that this rank owns, of each stage
        and of the tied bucket. Added up over all ranks they are those of the whole model.
        """
        self._bring_home()
        for shard in self.shards:
            if shard.bucket.index == self.stages or shard.bucket.late:
                shard.start_reduce()
        for shard in self.shards:
            shard.advance_reduction()
        self._reducing.clear()
        squares = torch.zeros(self.stages + 1, dtype=torch.float64, device=self.mesh.device)
        for shard in self.shards:
            shard.finish_reduce()
            if loss_scale != 1.0:
                shard.grad.mul_(1.0 / loss_scale)
            squares[shard.bucket.index] += shard.own_square()
        return squares

    def _bring_home(self) -> None:
        """Add the gradients of replicas to those of the ranks that own the weights."""
        coming = [(each, each.start_grad_return()) for each in self._all_replicas()]
        for each, begun in coming:
            if begun is not None:
                received, wait = begun
                wait()
                each.add_returned_grads(received)

    def reduce_stage(self, stage: int) -> None:
        """Send off the gradients of a stage, or of the tied embedding, which are complete."""
        self._own[stage].launch_remaining()

    def finish_stage(self, stage: int) -> Tensor:
        """Complete the sum over the replicas of the gradients of a stage, or of the tied embedding.

        Returns fp64 [1]: squared norm of the gradients of it that this rank owns.
        """
        square = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        for shard in self._own[stage].shards:
            shard.finish_reduce()
            square += shard.own_square()
        return square

    def update(self, lr: float, factor: float = 1.0) -> None:
        """Take one step with learning rate `lr` by the gradients times `factor`."""
        self._step(self.shards, lr, factor, self.count)
        self.count += 1
        self.lr = lr
        self._publish_ahead()

    def update_stage(self, stage: int, lr: float, factor: float, count: int) -> None:
        """Take the step after `count` earlier ones of one stage alone, or of the tied embedding,
        whose number is that of stages, and begin to gather its weights."""
        own = self._own[stage].shards
        self._step(own, lr, factor, count)
        for shard in own:
            if self.config.look_ahead:
                distance = self._look_ahead(shard) * lr
                predict(self.rule, shard, distance, count + 1, shard.weights)
            shard.start_gather_after_update()

    @torch.no_grad()
    def _step(self, shards: Sequence[Shard], lr: float, factor: float, count: int) -> None:
        own = [shard for shard in shards if shard.updates]
        if factor != 1.0:
            for shard in own:
                shard.grad.mul_(factor)
        for shard in own:
            shard.await_readers()
            shard.store.begin(count)
        with followed(own, self._velocity):
            self.rule.step(own, lr, count)

    def shards_of(self, stage: int) -> Sequence[Shard]:
        """Shards of all weights that a stage computes with, tied ones included."""
        return self._of_stage[stage]

    def _look_ahead(self, shard: Shard) -> float:
        """By how many updates weights are ahead of their masters."""
        steps = self.config.look_ahead
        return self._staleness[shard.bucket.index] if steps == "staleness" else steps

    def _publish_ahead(self, times: int = 1) -> None:
        """Begin to gather the weights that look ahead of the masters, or with 0 `times` these."""
        if self.config.look_ahead:
            for shard in self.shards:
                shard.await_readers()
                distance = times * self._look_ahead(shard) * self.lr
                predict(self.rule, shard, distance, self.count, shard.weights)
        for shard in self.shards_by_first_use():
            shard.start_gather_after_update()
        self._copies_are_old()

    def _copies_are_old(self) -> None:
        """Weights have changed, and their replicas have not."""
        for replicas in self._all_replicas():
            replicas.mark_stale()

    @contextmanager
    def use_master_weights(self) -> Iterator[None]:
        """A context in which the model computes with the masters, whatever ``look_ahead`` is.

        All ranks enter and leave it, between steps.
        """
        if self.config.look_ahead:
            self._publish_ahead(0)
            self.await_all_weights()
        yield
        if self.config.look_ahead:
            self._publish_ahead()
            self.await_all_weights()

    def states_finite(self) -> Tensor:
        """0, fp64 [1], where the last update left finite masters and states here, else NaN."""
        finite = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        for shard in self.shards:
            finite += shard.store.finite
        return finite

    def where_not_finite(self, *, states: bool = False) -> str | None:
        """Where reduced gradients, or masters and states, are not finite: how many tensors, the
        first of them, and the ranks that have them; None: nowhere. All ranks call it."""
        own = self._states_not_finite() if states else self._gradients_not_finite()
        names = list(dict.fromkeys(own))
        counts = self.mesh.gather_numbers(torch.tensor([len(names)])).flatten().tolist()
        ranks = [rank for rank, count in enumerate(counts) if count]
        first = self.mesh.agree(names[0] if ranks[:1] == [self.mesh.rank] else None)
        if sum(counts) <= 1:
            return f"{first} on rank {ranks[0]}" if ranks else None
        on = f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
        return f"{sum(counts):,} tensors on {on}, {first} the first"

    def _gradients_not_finite(self) -> Iterator[str]:
        for shard, entry in self._with_states():
            if not all_finite(shard.grad[shard.own_range(entry)]):
                yield entry.spec.name

    def _states_not_finite(self) -> Iterator[str]:
        for name in (MASTER, *self._states()):
            for shard, entry in self._with_state(name):
                here = shard.own_range(entry)
                if not all_finite(shard.store.read(name, here.start, here.stop)):
                    yield entry.spec.name if name == MASTER else f"{name} of {entry.spec.name}"

    def snapshot(self) -> None:
        """Remember weights and states, for :meth:`restore`."""
        self._kept = self.count
        for shard in self.shards:
            shard.store.snapshot()

    def restore(self) -> None:
        """Put weights and states back to what :meth:`snapshot` saw, bitwise; gradients stay.

        All ranks call it, also those that have made no update since.
        """
        self.count = self._kept
        for shard in self.shards:
            shard.await_weights()
            shard.store.restore()
        for shard in self.shards_by_first_use():
            shard.start_gather_after_update()
        self._copies_are_old()

    def gather_shared_weights(self) -> None:
        """Take part in the gathers of buckets that other pipeline ranks may have updated."""
        for shard in self.shards_by_first_use():
            if shard.bucket.shared:
                shard.start_gather_after_update()

    def shards_by_first_use(self) -> list[Shard]:
        """Shards in the order in which a step first uses them, the same on all ranks that share
        one: by stage, the tied embedding beside the first stage."""
        return sorted(self.shards, key=lambda shard: shard.bucket.index % self.stages)

    def await_all_weights(self) -> None:
        """Wait until the weights of the last update are gathered, and replicas have them."""
        for shard in self.shards:
            shard.await_weights()
        for replicas in self._all_replicas():
            replicas.wait_broadcast()

    @torch.no_grad()
    def set_weights(self, fill: Fill, *, threads: int = 0) -> None:
        """Set every local weight: `fill(spec, out)` writes a region of a global tensor, in threads
        if `threads` is not 0; see :func:`~megapipe.optim.filling.fill_parameters`.

        Masters get the values in full precision, weights in the model dtype.
        """
        places = ((*each, each[0].weights_in_place(each[1])) for each in self._with_weights())
        for shard, entry, values in fill_parameters(places, fill, threads):
            shard.set_weights(entry, values)
        self._copies_are_old()

    def set_states(
        self,
        steps: int,
        fill: Callable[[str, LocalParameter, Tensor], None],
        *,
        lr: float = 0.0,
        threads: int = 0,
    ) -> None:
        """Set the states after `steps`, the last one with learning rate `lr`, when the weights are
        set: `fill(name, spec, out)` writes one region, as in :meth:`set_weights`. All ranks call
        it: weights that are ahead of the masters are gathered."""
        self.count = steps
        self.lr = lr
        for shard in self.shards:
            shard.store.finite = 0.0  # what is loaded has been looked at
        for name in self._states():
            fill_state = functools.partial(fill, name)
            held = self._with_state(name)
            places = ((*each, each[0].state_in_place(name, each[1])) for each in held)
            for shard, entry, values in fill_parameters(places, fill_state, threads):
                shard.set_state(name, entry, values)
        if self.config.look_ahead:
            self._publish_ahead()
            self.await_all_weights()

    def loaded(self) -> Iterator[tuple[str, LocalParameter]]:
        """Names of what :meth:`set_weights` and :meth:`set_states` ask for: "model" or
        "optimizer.STATE", and the parameter."""
        for _, entry in self._with_weights():
            yield "model", entry.spec
        for name in self._states():
            for _, entry in self._with_state(name):
                yield f"optimizer.{name}", entry.spec

    def _with_weights(self) -> Iterator[tuple[Shard, ParamRange]]:
        """Every parameter."""
        for shard in (*self.shards, *self.frozen):
            for entry in shard.bucket.entries:
                yield shard, entry

    def _states(self) -> list[str]:
        """Names of all states that some shard here has."""
        return [*dict.fromkeys(name for shard in self.shards for name in shard.store.states)]

    def _with_state(self, name: str) -> Iterator[tuple[Shard, ParamRange]]:
        """Parameters of which this rank has a state, or masters."""
        for shard, entry in self._with_states():
            if name in (MASTER, *shard.store.states):
                yield shard, entry

    def _with_states(self) -> Iterator[tuple[Shard, ParamRange]]:
        """Parameters of which this rank has states."""
        for shard in self.shards:
            for entry in shard.bucket.entries:
                if entry.start < shard.stop and shard.start < entry.stop:
                    yield shard, entry

    def own_slices(self) -> Iterator[OwnSlice]:
        """The parts of its shards that this rank counts in the norm and writes to checkpoints."""
        for shard in (*self.shards, *self.frozen):
            for entry in shard.bucket.entries:
                if not entry.spec.is_primary:
                    continue
                a, b = max(entry.start, shard.own_start), min(entry.stop, shard.own_stop)
                if a < b:
                    here = a - shard.start, b - shard.start
                    master = shard.store.read("model", *here)
                    if master.dtype == torch.float16:
                        master = master.float()  # frozen ones; a checkpoint has no fp16
                    values = {"model": master}
                    for name in shard.store.states:
                        values[f"optimizer.{name}"] = shard.store.read(name, *here)
                    for age, older in enumerate(shard.older, start=1):
                        values[f"stash.{age}"] = older[a:b]
                    yield OwnSlice(entry.spec, a - entry.start, b - entry.start, values)
