"""Pipelines without a flush (``pipeline.weights``): their streams, and what they do not take."""

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.errors import ConfigError, ScheduleError
from megapipe.layout.checks import check_direction
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.streams.load import load_stream
from megapipe.schedule.streams.meetings import check_shared_updates
from megapipe.schedule.streams.orders import build, least_window
from megapipe.schedule.streams.policies import POLICIES
from megapipe.schedule.streams.stream import AsyncSchedule, finite
from megapipe.words import join_or


def async_schedule_of(config: Config, microbatches: int) -> AsyncSchedule | None:
    """The stream of a run, proved; None: its training is synchronous.

    Raises :class:`ConfigError` for keys that it does not take.
    """
    pipeline, train = config.pipeline, config.train
    if pipeline.weights == "synchronous":
        if config.optimizer.look_ahead == "staleness":
            raise ConfigError(
                "optimizer.look_ahead=staleness is for a pipeline.weights other than synchronous: "
                "expected a whole number"
            )
        return None
    if pipeline.synchronous_steps is not None and pipeline.synchronous_steps >= train.steps:
        raise ConfigError(
            f"pipeline.synchronous_steps={pipeline.synchronous_steps}: none of train.steps="
            f"{train.steps} is left for pipeline.weights={pipeline.weights}: expected at most "
            f"{train.steps - 1}"
        )
    where = f"pipeline.weights={pipeline.weights}"
    for expected in _refusals(config):
        raise ConfigError(f"{where} needs {expected}")
    if pipeline.weights == "predict":
        check_direction(config, where)
    ranks, advance = config.parallel.pp, pipeline.advance or 0
    rows, least = train.global_batch // microbatches, least_window(pipeline.schedule, ranks)
    if microbatches < least:
        raise ConfigError(
            f"{where}: {pipeline.schedule} on {ranks} ranks needs steps of at least {least} "
            f"micro-batches, not {microbatches}: expected a train.global_batch of at least "
            f"{least * rows}"
        )
    try:
        order = build(
            pipeline.schedule, ranks, microbatches, advance=advance, replicas=pipeline.replicas
        )
        if POLICIES[pipeline.weights].late and order.ahead > microbatches:
            turns = len(order.placement.table)
            least = -(-order.ahead // turns) * turns
            raise ConfigError(
                f"{where}: {order.ahead} micro-batches are in flight ahead of a step, which has "
                f"{microbatches}: expected a train.global_batch of at least {least * rows}"
            )
        stream = load_stream(
            pipeline.schedule,
            pipeline.weights,
            ranks=ranks,
            microbatches=microbatches,
            advance=advance,
            horizon=pipeline.horizon,
            replicas=pipeline.replicas,
        )
        windows = finite(stream, 2 * stream.ahead + 3)
        validate(windows)
        check_shared_updates(windows)
    except ScheduleError as error:
        raise ConfigError(f"{where}: {error}") from None
    return stream


def _refusals(config: Config) -> Iterator[str]:
    """Things that have to be otherwise, each in words."""
    pipeline, optimizer, numbers = config.pipeline, config.optimizer, config.numbers
    activations, policy = config.activations, POLICIES[pipeline.weights]
    if pipeline.schedule not in policy.orders:
        yield f"pipeline.schedule={join_or(policy.orders)}, not {pipeline.schedule}"
    alone = () if pipeline.schedule == "1f1b_rr" else ("replicas",)
    for key in ("placement", "chunks", "group", "slices", "slice_overhead", "pairs", *alone):
        if getattr(pipeline, key) is not None:
            yield f"pipeline.{key}=null, not {getattr(pipeline, key)}"
    if pipeline.memory_limit is not None:
        yield f"pipeline.memory_limit=null, not {pipeline.memory_limit:g}"
    if config.model.source is not None:
        yield f"model.source=null, not {config.model.source}"
    if config.lora.rank is not None:
        yield f"lora.rank=null, not {config.lora.rank}"
    if config.model.moe.experts is not None:
        yield f"model.moe.experts=null, not {config.model.moe.experts}"
    if config.parallel.cp > 1:
        yield f"parallel.cp=1, not {config.parallel.cp}"
    if config.model.tied_embeddings and not policy.waits:
        yield (
            "model.tied_embeddings=false, or pipeline.weights=double_buffer: other updates do not "
            "wait for what the first and the last stage add to a tied embedding"
        )
    if config.model.tied_embeddings and pipeline.schedule == "1f1b_rr":
        yield "model.tied_embeddings=false with pipeline.schedule=1f1b_rr"
    if config.model.dtype == "fp16":
        yield "model.dtype=bf16, fp32 or fp64, not fp16"
    if optimizer.clip is not None and optimizer.clip_scope == "global" and not policy.waits:
        yield (
            "optimizer.clip_scope=stage (or optimizer.clip=null), not global: "
            "updates do not wait for the norms of all stages"
        )
    if optimizer.zero > 1:
        yield f"optimizer.zero=0 or 1, not {optimizer.zero}"
    if optimizer.look_ahead and not policy.follows:
        yield f"optimizer.look_ahead=0, not {optimizer.look_ahead}"
    if optimizer.look_ahead and pipeline.lr_anneal_steps is not None:
        yield f"pipeline.lr_anneal_steps=null with optimizer.look_ahead={optimizer.look_ahead}"
    if optimizer.look_ahead == "staleness" and pipeline.synchronous_steps is not None:
        yield "pipeline.synchronous_steps=null with optimizer.look_ahead=staleness"
    if optimizer.master != "fp32":
        yield f"optimizer.master=fp32, not {optimizer.master}"
    if optimizer.post_validation:
        yield "optimizer.post_validation=false"
    if not policy.follows and config.kernels.compile:
        yield "kernels.compile=false: a compiled backward reads the weights of its forward"
    if not policy.follows and (activations.policies != {"keep"} or activations.offload):
        yield "activations.policy=keep and activations.offload=[]"
    if not policy.follows and pipeline.advance and config.kernels.loss_chunk != 0:
        yield "kernels.loss_chunk=0 with pipeline.advance: a loss in chunks reads B's weights"
    if config.train.batch_ramp is not None:
        yield "train.batch_ramp=null"
    if numbers.actions != {"stop"} or numbers.spike_factor is not None:
        yield "numbers.non_finite=stop and numbers.spike_factor=null"
    if numbers.rerun_every:
        yield f"numbers.rerun_every=0, not {numbers.rerun_every}"
