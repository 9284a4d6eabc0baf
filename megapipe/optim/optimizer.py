"""The optimizer of one process: reduces, clips and applies the gradients of its buckets.

The programs of the pipeline ranks decide when a stage's gradients are reduced and when its weights
are needed (:mod:`megapipe.schedule.data_parallel`). :mod:`megapipe.optim.shard` implements
reduction and all-gather of a bucket, :mod:`megapipe.optim.rules` the update of a shard.
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
from megapipe.optim.bucket_launch import BucketLauncher
from megapipe.optim.buffers import Bucket, ParamRange
from megapipe.optim.reduction import REDUCE_DTYPES
from megapipe.optim.rules import build_rule
from megapipe.optim.shard import Shard
from megapipe.optim.state_store import MASTER, StatePolicy
from megapipe.optim.velocity import followed
from megapipe.optim.weight_loading import Fill, fill_parameters
from megapipe.optim.weight_prediction import predict
from megapipe.text import ranges
from megapipe.util.finite import all_finite


class OwnSlice(NamedTuple):
    """A range that this rank writes to checkpoints: flat [start, stop) of a parameter's local
    region."""

    spec: LocalParameter
    start: int
    stop: int
    values: dict[str, Tensor]
    """Flat values by name: "model" (master weights), states ("optimizer.exp_avg", ...), and older
    weight versions still read ("stash.1", ...); frozen parameters have only "model"."""


class Optimizer:
    """Updates the weights in `buckets` of stages 0 .. `stages` - 1 and of the tied embedding.

    The order of calls in a step: :meth:`zero_grad`; the backward passes, in which the executor
    calls the methods of :class:`~megapipe.engine.executor.DataParallelHooks`;
    :meth:`finish_reduce`; :meth:`update`. `states` is the storage policy of optimizer states;
    `kernel` computes Adam steps. Three arguments are by stage: `velocity` is the decay of the
    weights' velocity, `staleness` the mean staleness, and `replicas` the expert replicas in the
    order of layers.
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
        """Expert replicas of each stage's layers, by stage."""
        self.mesh = mesh
        self.stages = stages
        self.rule = build_rule(config, kernel)
        self.count = 0
        """Number of updates that the optimizer states have seen."""
        self.lr = 0.0
        """Learning rate of the newest update."""
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
        """Shards of frozen weights. They have no gradients, states or separate masters."""
        self._own: dict[int, BucketLauncher] = defaultdict(BucketLauncher)
        """Launcher of each stage's bucket reductions; key `stages` is for the tied embedding."""
        self._through: Counter[int] = Counter()
        """Number of times that local pipeline ranks have completed each stage's gradients."""
        self._of_stage: dict[int, list[Shard]] = defaultdict(list)
        """Shards of all weights that a stage computes with, tied ones included, by stage."""
        self._reducing: list[int] = []
        """Stages with sharded gradients whose reduction is in flight, the oldest first."""
        for shard in (*self.shards, *self.frozen):
            index = shard.bucket.index
            users = [index] if index < stages else [0, stages - 1]
            for stage in users:
                self._of_stage[stage].append(shard)
            if not shard.bucket.frozen:
                self._own[index].add(shard)

    def _parts_of(self, bucket: Bucket) -> Axis:
        """Return the axis of the ranks whose parts the update rule may join to whole tensors."""
        if not bucket.over_ep:
            return self.mesh.tp
        return Axis.alone(self.mesh.rank) if self.rule.declaration.elementwise else self.mesh.etp

    def zero_grad(self) -> None:
        """Begin a step with zero gradients; drop reductions left over from an aborted step."""
        self._reducing.clear()
        self._through.clear()
        for own in self._own.values():
            own.begin()
        for shard in self.shards:
            shard.zero_grad()
        for replicas in self._all_replicas():
            replicas.zero_grad()

    def _all_replicas(self) -> Iterator[WeightReplicas]:
        """Yield all expert replicas by stage and layer, an order equal on all ranks."""
        return chain.from_iterable(self.replicas.values())

    def alloc_grads(self, stage: int) -> None:
        own = self._sharded(stage)
        # with the stage being added to, at most two stages have memory for gradients
        while own and (len(self._reducing) > 1 or stage in self._reducing):
            for shard in self._sharded(self._reducing.pop(0)):
                shard.finish_reduce()
        for shard in own:
            shard.bucket.alloc_grads()

    def _sharded(self, stage: int) -> list[Shard]:
        """Return the shards of a stage whose gradients are sharded (ZeRO-2, 3)."""
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
        """Start sending changed expert weights to their replicas after an update. Collective.
        Weights that owners must all-gather first are sent in :meth:`wait_weights`."""
        for stage, of_stage in self.replicas.items():
            owners = (s.axis for s in self._of_stage[stage] if s.bucket.over_ep)
            if all(axis.size == 1 for axis in owners):
                for replicas in of_stage:
                    replicas.start_broadcast()

    def reshard(self, stage: int) -> None:
        for shard in self._of_stage[stage]:
            shard.reshard()

    def finish_reduce(self, loss_scale: float = 1.0) -> Tensor:
        """Complete the sum of the step's gradients over the replicas; divide by `loss_scale`.

        Returns fp64 [stages + 1], one value per stage and one for the tied embedding: the squared
        norm of the gradients that this rank counts. Summed over all ranks, the values are the
        squared norms of the whole model.
        """
        self._return_replica_grads()
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

    def _return_replica_grads(self) -> None:
        """Add the gradients of expert replicas to the gradients on the owners' ranks."""
        coming = [(each, each.start_grad_return()) for each in self._all_replicas()]
        for each, begun in coming:
            if begun is not None:
                received, wait = begun
                wait()
                each.add_returned_grads(received)

    def reduce_stage(self, stage: int) -> None:
        """Start reducing the complete gradients of a stage, or of the tied embedding."""
        self._own[stage].launch_remaining()

    def finish_stage(self, stage: int) -> Tensor:
        """Complete the reduction of the gradients of a stage, or of the tied embedding.

        Returns fp64 [1]: the squared norm of the gradients that this rank counts.
        """
        square = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        for shard in self._own[stage].shards:
            shard.finish_reduce()
            square += shard.own_square()
        return square

    def update(self, lr: float, factor: float = 1.0) -> None:
        """Update all weights with learning rate `lr`. `factor` (clipping) scales the gradients."""
        self._step(self.shards, lr, factor, self.count)
        self.count += 1
        self.lr = lr
        self._predict_and_gather()

    def update_stage(self, stage: int, lr: float, factor: float, count: int) -> None:
        """Update one stage, or the tied embedding (`stage` is the number of stages), after `count`
        earlier updates, and start the all-gather of its weights."""
        own = self._own[stage].shards
        self._step(own, lr, factor, count)
        for shard in own:
            if self.config.weight_prediction:
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
        """Return the shards of all weights that a stage computes with, tied ones included."""
        return self._of_stage[stage]

    def _look_ahead(self, shard: Shard) -> float:
        """Return the number of updates by which a shard's weights are predicted ahead of its
        masters."""
        steps = self.config.weight_prediction
        return self._staleness[shard.bucket.index] if steps == "staleness" else steps

    def _predict_and_gather(self, times: int = 1) -> None:
        """Predict weights, if configured, `times` the usual distance ahead; start all-gathers."""
        if self.config.weight_prediction:
            for shard in self.shards:
                shard.await_readers()
                distance = times * self._look_ahead(shard) * self.lr
                predict(self.rule, shard, distance, self.count, shard.weights)
        for shard in self.shards_by_first_use():
            shard.start_gather_after_update()
        self._mark_replicas_stale()

    def _mark_replicas_stale(self) -> None:
        """Mark all expert replicas as stale: their weights have not received the last update."""
        for replicas in self._all_replicas():
            replicas.mark_stale()

    @contextmanager
    def use_master_weights(self) -> Iterator[None]:
        """Enter a context in which the model computes with masters, not with predicted weights.

        All ranks enter and leave the context between steps.
        """
        if self.config.weight_prediction:
            self._predict_and_gather(0)
            self.await_all_weights()
        yield
        if self.config.weight_prediction:
            self._predict_and_gather()
            self.await_all_weights()

    def states_finite(self) -> Tensor:
        """Return fp64 [1]: 0 if the last update left finite local masters and states, else NaN."""
        finite = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        for shard in self.shards:
            finite += shard.store.finite
        return finite

    def where_not_finite(self, *, states: bool = False) -> str | None:
        """Describe where reduced gradients (or, with `states`, masters and states) are not finite:
        number of tensors, the first tensor, and ranks. None if all are finite. Collective."""
        own = self._states_not_finite() if states else self._gradients_not_finite()
        names = list(dict.fromkeys(own))
        counts = self.mesh.gather_numbers(torch.tensor([len(names)])).flatten().tolist()
        ranks = [rank for rank, count in enumerate(counts) if count]
        first = self.mesh.agree(names[0] if ranks[:1] == [self.mesh.rank] else None)
        if sum(counts) <= 1:
            return f"{first} on rank {ranks[0]}" if ranks else None
        on = f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
        return f"{sum(counts):,} tensors on {on}, the first is {first}"

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
        """Save weights and states for :meth:`restore`."""
        self._kept = self.count
        for shard in self.shards:
            shard.store.snapshot()

    def restore(self) -> None:
        """Restore weights and states to what :meth:`snapshot` saved, bitwise; gradients stay.

        All ranks call it, even ranks that have made no update since the snapshot.
        """
        self.count = self._kept
        for shard in self.shards:
            shard.await_weights()
            shard.store.restore()
        for shard in self.shards_by_first_use():
            shard.start_gather_after_update()
        self._mark_replicas_stale()

    def gather_shared_weights(self) -> None:
        """Take part in the all-gathers of buckets that other pipeline ranks may have updated."""
        for shard in self.shards_by_first_use():
            if shard.bucket.shared:
                shard.start_gather_after_update()

    def shards_by_first_use(self) -> list[Shard]:
        """Return the shards in the order of their first use in a step: by stage, the tied embedding
        with the first stage. The order is equal on all ranks that share a bucket."""
        return sorted(self.shards, key=lambda shard: shard.bucket.index % self.stages)

    def await_all_weights(self) -> None:
        """Wait until the last update's weights are all-gathered and sent to expert replicas."""
        for shard in self.shards:
            shard.await_weights()
        for replicas in self._all_replicas():
            replicas.wait_broadcast()

    @torch.no_grad()
    def set_weights(self, fill: Fill, *, threads: int = 0) -> None:
        """Set all local weights to the values that `fill(spec, out)` writes for each parameter.

        :func:`~megapipe.optim.weight_loading.fill_parameters` explains `fill` and `threads`.
        Masters get the values in full precision, weights in the model dtype.
        """
        targets = ((*each, each[0].weights_in_place(each[1])) for each in self._with_weights())
        for shard, entry, values in fill_parameters(targets, fill, threads):
            shard.set_weights(entry, values)
        self._mark_replicas_stale()

    def set_states(
        self,
        steps: int,
        fill: Callable[[str, LocalParameter, Tensor], None],
        *,
        lr: float = 0.0,
        threads: int = 0,
    ) -> None:
        """Set the states to those after `steps` updates, the last one with learning rate `lr`.
        Weights must be set before. `fill(name, spec, out)` writes a state of one parameter, as in
        :meth:`set_weights`. Collective: predicted weights are all-gathered."""
        self.count = steps
        self.lr = lr
        for shard in self.shards:
            shard.store.finite = 0.0  # loaded values have been checked
        for name in self._states():
            fill_state = functools.partial(fill, name)
            with_state = self._with_state(name)
            targets = ((*each, each[0].state_in_place(name, each[1])) for each in with_state)
            for shard, entry, values in fill_parameters(targets, fill_state, threads):
                shard.set_state(name, entry, values)
        if self.config.weight_prediction:
            self._predict_and_gather()
            self.await_all_weights()

    def loaded(self) -> Iterator[tuple[str, LocalParameter]]:
        """Yield name and parameter of all values that :meth:`set_weights` and :meth:`set_states`
        load. A name is "model" or "optimizer.STATE"."""
        for _, entry in self._with_weights():
            yield "model", entry.spec
        for name in self._states():
            for _, entry in self._with_state(name):
                yield f"optimizer.{name}", entry.spec

    def _with_weights(self) -> Iterator[tuple[Shard, ParamRange]]:
        """Yield every parameter of this rank with its shard, frozen parameters included."""
        for shard in (*self.shards, *self.frozen):
            for entry in shard.bucket.entries:
                yield shard, entry

    def _states(self) -> list[str]:
        """Return the names of all states that some local shard has."""
        return [*dict.fromkeys(name for shard in self.shards for name in shard.store.states)]

    def _with_state(self, name: str) -> Iterator[tuple[Shard, ParamRange]]:
        """Yield the shards that have state `name`, with the parameters that overlap them."""
        for shard, entry in self._with_states():
            if name in (MASTER, *shard.store.states):
                yield shard, entry

    def _with_states(self) -> Iterator[tuple[Shard, ParamRange]]:
        """Yield the parameters that overlap this rank's shards, with their shards."""
        for shard in self.shards:
            for entry in shard.bucket.entries:
                if entry.start < shard.stop and shard.start < entry.stop:
                    yield shard, entry

    def own_slices(self) -> Iterator[OwnSlice]:
        """Yield the values that this rank counts in the norm and writes to checkpoints."""
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
