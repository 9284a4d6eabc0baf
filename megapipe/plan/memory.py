"""Bytes that weights, gradients and optimizer take in a process, counted before it exists."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megapipe.config.config import Config, OptimizerConfig
from megapipe.config.update_rules import declaration
from megapipe.layout.buckets import BucketPlan, process_buckets
from megapipe.layout.layout import Layout
from megapipe.plan.dp_actions import replica_actions
from megapipe.schedule.async_schedules.async_schedule import (
    moved_back,
    predictions_kept,
    versions_kept,
)
from megapipe.schedule.program import Action, ActionKind
from megapipe.util.dtypes import DTYPE_BYTES, main_bytes

COPIES_KEPT = 2
"""Number of in-memory checkpoints per process that a node keeps (``checkpoint.in_memory_every``):
if the newest is incomplete after a kill, the other remains. With several nodes, each node also
keeps the in-memory checkpoints of the previous node."""


@dataclass(frozen=True)
class ModelMemory:
    """Bytes that one process holds on its device, besides activations."""

    parameters: int
    """Bytes of the weights: all weight versions of a no-flush schedule, predicted ones included,
    and expert replicas in all slots."""
    older_versions: int
    """Part of `parameters` for weight versions other than the newest."""
    gradients: int
    """Bytes of main gradients. There are two sets if the gradients of one update window wait for
    their update while those of the next window are accumulated."""
    second_gradients: int
    """Part of `gradients` for the second set."""
    optimizer: int
    """Bytes of optimizer states, and of master weights unless they alias the parameters."""
    transient: int
    """Maximum additional bytes during a step: shards of reduced gradients; with ZeRO-2 and 3 the
    whole gradients of up to two stages; with ZeRO-3 gathered weights; and the snapshot from which
    post-validation restores. Communication buffers are left out."""
    offloaded: int
    """Bytes of optimizer state in host memory or on a disk."""
    checkpoint_part: int
    """Upper bound of the process's part of a checkpoint; async_save copies it to host memory."""

    @property
    def persistent(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.persistent + self.transient


def model_memory(config: Config, layout: Layout, rank: int) -> ModelMemory:
    """Return the model's bytes in a process at pipeline index `rank`."""
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
            gradients += bucket.norm_numel * main  # separate: they may come before the others
        else:
            gradients += bucket.uses * bucket.numel * main * turns
            waiting += bucket.uses * bucket.numel * main * (turns - 1)
        if bucket.link:
            gradients += own * main  # gradients from the other stage, when they arrive
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


def update_bytes(config: Config, layout: Layout, rank: int) -> int:
    """Return the bytes that an update at pipeline index `rank` moves on the device. It reads
    gradients twice (norm, update) and sets them to 0, reads and writes states and master weights,
    and writes weights."""
    size, main = DTYPE_BYTES[config.model.dtype], main_bytes(config.model.dtype)
    apart, moved = _keeps_apart(config, layout), 0
    for bucket in process_buckets(config, layout, rank):
        if bucket.updates and not bucket.frozen:
            each = 2 * main + 2 * _state_bytes(config.optimizer, size, main, apart) + size
            moved += _slice(bucket) * each + bucket.numel * main
    return moved


def _most_passing(config: Config, layout: Layout, rank: int, buckets: Sequence[BucketPlan]) -> int:
    """Return the peak bytes of reduced shards, whole gradients and gathered weights together.

    If one process runs all pipeline ranks, the peaks of all ranks are added up.
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
    """Yield bytes of shards, gradients and weights after each action of a ZeRO-2 or 3 program."""
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
    reducing: list[int] = []  # oldest first
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
    """Return the number of values in a process's shard of a bucket."""
    return bucket.numel // bucket.shard.members


def checkpoint_bytes(config: Config, layout: Layout) -> int:
    """Return the bytes of all tensors of a checkpoint."""
    trained = layout.model.num_parameters(trained=True)
    frozen = layout.model.num_parameters() - trained
    size, main = DTYPE_BYTES[config.model.dtype], main_bytes(config.model.dtype)
    each = kept_bytes(config, layout)
    older: dict[str, int] = {}
    if layout.async_schedule is not None:
        for stage, kept in versions_kept(layout.async_schedule).items():
            for spec in layout.model.parameters(layout.stage_layers[stage]):
                nbytes = (kept - 1) * prod(spec.shape) * size
                older[spec.name] = max(older.get(spec.name, 0), nbytes)  # a tied one: both ends
    moving = (
        layout.model.num_parameters(layout.stage_layers[stage]) for stage in _with_velocity(layout)
    )
    beside = sum(older.values()) + sum(moving) * main
    buffers = _buffer_bytes(config, layout)
    return trained * each + frozen * _frozen_bytes(config.model.dtype) + beside + buffers


def _buffer_bytes(config: Config, layout: Layout) -> int:
    """Return the bytes in rank 0's part of a checkpoint for expert biases and for the counts of
    choices in two steps: the newest step, and the step from which replicas were chosen."""
    biases = sum(map(prod, layout.model.buffers().values())) * main_bytes(config.model.dtype)
    counted = (config.model.moe.aux_loss_scope == "step") + config.experts.copies
    return biases + 8 * counted * sum(layout.model.experts().values())


def state_bytes(config: Config, layout: Layout) -> int:
    """Return the bytes of optimizer state per parameter, with the master weight if separate."""
    size, main = DTYPE_BYTES[config.model.dtype], main_bytes(config.model.dtype)
    return _state_bytes(config.optimizer, size, main, _keeps_apart(config, layout))


def kept_bytes(config: Config, layout: Layout) -> int:
    """Return the checkpoint bytes per trained parameter: its states, and its master weight if that
    is separate, else its weight."""
    size, main = DTYPE_BYTES[config.model.dtype], main_bytes(config.model.dtype)
    return _saved_bytes(config.optimizer, size, main, _keeps_apart(config, layout))


def _with_velocity(layout: Layout) -> Collection[int]:
    """Return the stages whose optimizer state includes an fp32 velocity of the weights."""
    return () if layout.async_schedule is None else moved_back(layout.async_schedule).keys()


def _frozen_bytes(dtype: str) -> int:
    """Return the checkpoint bytes per frozen parameter; fp16 is stored in a wider type."""
    return main_bytes(dtype) if dtype == "fp16" else DTYPE_BYTES[dtype]


def _saved_bytes(optimizer: OptimizerConfig, weight: int, main: int, apart: bool) -> int:
    """Return the checkpoint bytes per trained parameter: its states, and its master weight if that
    is separate, else its weight."""
    master = 0 if _has_master(optimizer, weight, main, apart) else weight
    return _state_bytes(optimizer, weight, main, apart) + master


def _state_bytes(optimizer: OptimizerConfig, weight: int, main: int, apart: bool) -> int:
    """Return the bytes of optimizer state per parameter, with the master weight if separate."""
    state = 2 if optimizer.state_dtype == "bf16" else main
    states = declaration(optimizer.rule).kept(optimizer.rule_options)
    return len(states) * state + (main if _has_master(optimizer, weight, main, apart) else 0)


def _undo_bytes(optimizer: OptimizerConfig, weight: int, main: int, apart: bool) -> int:
    """Return the bytes per parameter of the snapshot for post-validation: its states, and its
    master weight if that is separate, else its weight."""
    own = 0 if _has_master(optimizer, weight, main, apart) else weight
    return _state_bytes(optimizer, weight, main, apart) + own


def _has_master(optimizer: OptimizerConfig, weight: int, main: int, apart: bool) -> bool:
    """Whether master weights have separate memory."""
    return apart or (weight < main and optimizer.master_weights == "fp32")


def _keeps_apart(config: Config, layout: Layout) -> bool:
    """Whether master weights are separate even if the weights have the same type as masters."""
    return config.optimizer.weight_prediction != 0 or layout.async_schedule is not None
