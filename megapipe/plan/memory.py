"""Bytes that a process holds of the model, counted before it exists."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megapipe.config.config import Config, OptimizerConfig
from megapipe.config.update_rules import declaration
from megapipe.layout.buckets import BucketPlan, process_buckets
from megapipe.layout.layout import Layout
from megapipe.plan.replicas import replica_actions
from megapipe.schedule.program import Action, ActionKind
from megapipe.schedule.streams.stream import moved_back, predictions_kept, versions_kept
from megapipe.util.dtypes import DTYPE_BYTES, main_bytes

COPIES_KEPT = 2
"""Copies of the state that a node has in memory in turn (``checkpoint.memory_every``), so that a
kill inside of one leaves the one before. Of several nodes each has as many of the one before it."""


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of one process, on its device."""

    parameters: int
    """All versions of them that are kept, and predicted ones, in a pipeline without a flush; and
    copies of experts in all slots."""
    older_versions: int
    """Of these, the ones beside the newest version."""
    gradients: int
    """Buffers of the main gradients; two sets where an update waits while the next come in."""
    second_gradients: int
    """Of these, the second set."""
    optimizer: int
    """States, and master weights where they are no alias of the parameters."""
    transient: int
    """The most that a step needs on top: the process' slices of the summed gradients; under ZeRO-2
    and 3 the gradients of two stages, being accumulated or reduced; under ZeRO-3 gathered weights;
    and the copy from which post-validation undoes an update. Buffers in transit are left out."""
    offloaded: int
    """Optimizer state in host memory or on a disk."""
    checkpoint_part: int
    """Its part of a checkpoint, at most: what a save in the background copies to host memory."""

    @property
    def persistent(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.persistent + self.transient


def model_memory(config: Config, layout: Layout, rank: int) -> ModelMemory:
    """Bytes that a process at pipeline index `rank` holds of the model."""
    size, main = DTYPE_BYTES[config.model.dtype], main_bytes(config.model.dtype)
    parameters = beside = gradients = waiting = optimizer = copies = saved = 0
    buckets = list(process_buckets(config, layout, rank))
    stream, kept, predicted = layout.async_schedule, dict[int, int](), dict[int, int]()
    if stream is not None:
        kept, predicted = versions_kept(stream), predictions_kept(stream)
    moving = _with_velocity(layout)
    turns = 2 if stream is not None and stream.policy.late else 1
    ends = (0, layout.stages - 1)
    apart = _keeps_apart(config, layout)
    for bucket in buckets:
        own = _slice(bucket)
        users = ends if bucket.stage == layout.stages else (bucket.stage,)
        versions = max(kept.get(stage, 1) for stage in users)
        ahead = max(predicted.get(stage, 0) for stage in users)
        if bucket.sharded_weights:
            parameters += own * size
        else:
            parameters += bucket.numel * size * (versions + ahead)
            beside += bucket.numel * size * (versions + ahead - 1)
        if not bucket.updates:
            gradients += bucket.numel * main * turns
            waiting += bucket.numel * main * (turns - 1)
            continue
        part = own // bucket.replicate.members
        if bucket.frozen:
            saved += part * _frozen_bytes(config.model.dtype)
            continue
        velocity = main if bucket.stage in moving else 0
        saved += part * (_saved_bytes(config.optimizer, size, main, apart) + velocity)
        saved += part * size * (versions - 1)
        optimizer += own * (_state_bytes(config.optimizer, size, main, apart) + velocity)
        if config.optimizer.post_validation:
            copies += own * _undo_bytes(config.optimizer, size, main, apart)
        parameters += bucket.replica_numel * size
        gradients += bucket.replica_numel * main
        if bucket.sharded_grads:
            gradients += bucket.norm_numel * main  # kept apart: they may come before the others
        else:
            gradients += bucket.uses * bucket.numel * main * turns
            waiting += bucket.uses * bucket.numel * main * (turns - 1)
        if bucket.link:
            gradients += own * main  # those of the copy, on their arrival
    away = config.optimizer.offload != "none"
    return ModelMemory(
        parameters=parameters,
        older_versions=beside,
        gradients=gradients,
        second_gradients=waiting,
        optimizer=0 if away else optimizer,
        transient=copies + _most_passing(config, layout, rank, buckets),
        offloaded=optimizer if away else 0,
        checkpoint_part=saved + (0 if rank else _buffer_bytes(config, layout)),
    )


def _most_passing(config: Config, layout: Layout, rank: int, buckets: Sequence[BucketPlan]) -> int:
    """Most bytes of summed slices, whole gradients and gathered weights at once in a step.

    Where one process runs all pipeline ranks, the peaks of all ranks are added up.
    """
    zero, main = layout.replicas.zero, main_bytes(config.model.dtype)
    at_the_end = sum(
        _slice(bucket) * main for bucket in buckets if not (bucket.is_unsharded or bucket.frozen)
    )
    if zero < 2:
        return at_the_end
    most = sum(
        max(_passing(actions, layout.stages, buckets, config.model.dtype), default=0)
        for actions in replica_actions(layout, rank)
    )
    return max(most, at_the_end)


def _passing(
    actions: Iterable[Action], stages: int, buckets: Sequence[BucketPlan], dtype: str
) -> Iterator[int]:
    """Bytes of slices, gradients and weights after each action of a program under ZeRO-2 or 3."""
    main, size = main_bytes(dtype), DTYPE_BYTES[dtype]
    weights: Counter[int] = Counter()
    numel: Counter[int] = Counter()
    slices: Counter[int] = Counter()
    for bucket in buckets:
        if bucket.is_unsharded:
            continue
        weights[bucket.stage] += bucket.numel
        if not (bucket.frozen or bucket.slots):
            numel[bucket.stage] += bucket.numel
            slices[bucket.stage] += _slice(bucket)
    opened: dict[int, int] = {}
    summed: dict[int, int] = {}
    users: Counter[int] = Counter()
    reducing: list[int] = []  # the oldest first
    for do, _, stage, *_ in actions:
        used = [stage, stages] if stage in (0, stages - 1) else [stage]
        if do == ActionKind.ALLOC_GRADS and stage in numel:
            while len(reducing) > 1 or stage in reducing:
                summed_up = reducing.pop(0)
                del opened[summed_up]
                summed[summed_up] = slices[summed_up] * main
            opened[stage] = numel[stage] * main
        elif do == ActionKind.REDUCE and stage in numel:
            reducing.append(stage)
        elif do == ActionKind.UNSHARD:
            users.update(used)
        elif do == ActionKind.RESHARD:
            users.subtract(used)
        else:
            continue
        gathered = sum(weights[index] for index, count in users.items() if count)
        yield gathered * size + sum(opened.values()) + sum(summed.values())


def _slice(bucket: BucketPlan) -> int:
    """Length of the slice that one process owns."""
    return bucket.numel // bucket.shard.members


def checkpoint_bytes(config: Config, layout: Layout) -> int:
    """Bytes of the tensors of a whole checkpoint."""
    trained = layout.model.num_parameters(trained=True)
    frozen = layout.model.num_parameters() - trained
    size, main = DTYPE_BYTES[config.model.dtype], main_bytes(config.model.dtype)
    each = kept_bytes(config, layout)
    older: dict[str, int] = {}
    if layout.async_schedule is not None:
        for stage, kept in versions_kept(layout.async_schedule).items():
            for spec in layout.model.parameters(layout.stage_layers[stage]):
                nbytes = (kept - 1) * prod(spec.shape) * size
                older[spec.name] = max(older.get(spec.name, 0), nbytes)  # a tied one on both ends
    moving = (
        layout.model.num_parameters(layout.stage_layers[stage]) for stage in _with_velocity(layout)
    )
    beside = sum(older.values()) + sum(moving) * main
    buffers = _buffer_bytes(config, layout)
    return trained * each + frozen * _frozen_bytes(config.model.dtype) + beside + buffers


def _buffer_bytes(config: Config, layout: Layout) -> int:
    """Bytes in a checkpoint, of rank 0, of biases of experts and of the choices of steps: the last
    one, and that by which copies were chosen."""
    biases = sum(map(prod, layout.model.buffers().values())) * main_bytes(config.model.dtype)
    counted = (config.model.moe.balance_scope == "step") + config.experts.copies
    return biases + 8 * counted * sum(layout.model.experts().values())


def state_bytes(config: Config, layout: Layout) -> int:
    """Bytes per parameter of states and of a master of its own."""
    size, main = DTYPE_BYTES[config.model.dtype], main_bytes(config.model.dtype)
    return _state_bytes(config.optimizer, size, main, _keeps_apart(config, layout))


def kept_bytes(config: Config, layout: Layout) -> int:
    """Bytes per parameter of states, and of the master or what takes its place."""
    size, main = DTYPE_BYTES[config.model.dtype], main_bytes(config.model.dtype)
    return _saved_bytes(config.optimizer, size, main, _keeps_apart(config, layout))


def _with_velocity(layout: Layout) -> Collection[int]:
    """Stages whose weights have a velocity beside their states, in the type of masters."""
    return () if layout.async_schedule is None else moved_back(layout.async_schedule).keys()


def _frozen_bytes(dtype: str) -> int:
    """Bytes in a checkpoint of a parameter that is not trained: there is no fp16 in it."""
    return main_bytes(dtype) if dtype == "fp16" else DTYPE_BYTES[dtype]


def _saved_bytes(optimizer: OptimizerConfig, weight: int, main: int, apart: bool) -> int:
    """Bytes per parameter in a checkpoint: states, and the master or what takes its place."""
    master = 0 if _has_master(optimizer, weight, main, apart) else weight
    return _state_bytes(optimizer, weight, main, apart) + master


def _state_bytes(optimizer: OptimizerConfig, weight: int, main: int, apart: bool) -> int:
    """Those of :func:`state_bytes`."""
    state = 2 if optimizer.state_dtype == "bf16" else main
    states = declaration(optimizer.rule).kept(optimizer.momentum)
    return len(states) * state + (main if _has_master(optimizer, weight, main, apart) else 0)


def _undo_bytes(optimizer: OptimizerConfig, weight: int, main: int, apart: bool) -> int:
    """Bytes per parameter of a copy of states and master, or of the weights that are their own."""
    own = 0 if _has_master(optimizer, weight, main, apart) else weight
    return _state_bytes(optimizer, weight, main, apart) + own


def _has_master(optimizer: OptimizerConfig, weight: int, main: int, apart: bool) -> bool:
    """Whether masters have memory of their own."""
    return apart or (weight < main and optimizer.master == "fp32")


def _keeps_apart(config: Config, layout: Layout) -> bool:
    """Whether masters are copies also of weights of their type."""
    return config.optimizer.look_ahead != 0 or layout.async_schedule is not None
