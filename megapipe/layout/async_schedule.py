"""Makes a run's no-flush schedule (``pipeline.weight_versions``), and refuses unsupported keys."""

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.errors import ConfigError, ScheduleError
from megapipe.layout.checks import check_direction
from megapipe.schedule.async_schedules.async_schedule import AsyncSchedule, finite
from megapipe.schedule.async_schedules.load import load_async_schedule
from megapipe.schedule.async_schedules.orders import build, least_window
from megapipe.schedule.async_schedules.policies import POLICIES
from megapipe.schedule.async_schedules.shared_updates import check_shared_updates
from megapipe.schedule.proof.validate import validate
from megapipe.text import join_or


def async_schedule_of(config: Config, microbatches: int) -> AsyncSchedule | None:
    """Return the no-flush schedule of a run, proved executable; None if training is synchronous.

    Raises :class:`ConfigError` for keys that a no-flush schedule does not support.
    """
    pipeline, train = config.pipeline, config.train
    if pipeline.weight_versions == "synchronous":
        if config.optimizer.weight_prediction == "staleness":
            raise ConfigError(
                "optimizer.weight_prediction=staleness is for a pipeline.weight_versions other "
                "than synchronous: expected a whole number"
            )
        return None
    if pipeline.synchronous_steps is not None and pipeline.synchronous_steps >= train.steps:
        raise ConfigError(
            f"pipeline.synchronous_steps={pipeline.synchronous_steps}: none of "
            f"train.steps={train.steps} is left for "
            f"pipeline.weight_versions={pipeline.weight_versions}: expected at most "
            f"{train.steps - 1}"
        )
    setting = f"pipeline.weight_versions={pipeline.weight_versions}"
    for expected in _refusals(config):
        raise ConfigError(f"{setting} needs {expected}")
    if pipeline.weight_versions == "predict":
        check_direction(config, setting)
    ranks, options = config.parallel.pp, pipeline.generator_options
    extra_warmup = options.extra_warmup or 0
    rows, least = train.global_batch // microbatches, least_window(pipeline.schedule, ranks)
    if microbatches < least:
        raise ConfigError(
            f"{setting}: {pipeline.schedule} on {ranks} ranks needs steps of at least {least} "
            f"micro-batches, not {microbatches}: expected a train.global_batch of at least "
            f"{least * rows}"
        )
    try:
        order = build(
            pipeline.schedule,
            ranks,
            microbatches,
            extra_warmup=extra_warmup,
            ranks_per_stage=options.ranks_per_stage,
        )
        if POLICIES[pipeline.weight_versions].late and order.ahead > microbatches:
            turns = len(order.placement.table)
            least = -(-order.ahead // turns) * turns
            raise ConfigError(
                f"{setting}: {order.ahead} micro-batches are in flight ahead of a step, which has "
                f"{microbatches}: expected a train.global_batch of at least {least * rows}"
            )
        stream = load_async_schedule(
            pipeline.schedule,
            pipeline.weight_versions,
            ranks=ranks,
            microbatches=microbatches,
            extra_warmup=extra_warmup,
            prediction_horizon=pipeline.prediction_horizon,
            ranks_per_stage=options.ranks_per_stage,
        )
        windows = finite(stream, 2 * stream.ahead + 3)
        validate(windows)
        check_shared_updates(windows)
    except ScheduleError as error:
        raise ConfigError(f"{setting}: {error}") from None
    return stream


def _refusals(config: Config) -> Iterator[str]:
    """Yield, in words, each setting that a no-flush schedule needs and `config` does not have."""
    pipeline, optimizer, health = config.pipeline, config.optimizer, config.health
    activations, policy = config.activations, POLICIES[pipeline.weight_versions]
    if pipeline.schedule not in policy.orders:
        yield f"pipeline.schedule={join_or(policy.orders)}, not {pipeline.schedule}"
    for key in ("placement", "chunks", "sequence_slices"):
        if getattr(pipeline, key) is not None:
            yield f"pipeline.{key}=null, not {getattr(pipeline, key)}"
    taken = "ranks_per_stage" if pipeline.schedule == "1f1b_rr" else "extra_warmup"
    for name, value in pipeline.options.items():
        if value is not None and name != taken:
            yield f"pipeline.options.{name}=null, not {value}"
    if pipeline.activation_limit is not None:
        yield f"pipeline.activation_limit=null, not {pipeline.activation_limit:g}"
    if config.model.source is not None:
        yield f"model.source=null, not {config.model.source}"
    if config.lora.rank is not None:
        yield f"lora.rank=null, not {config.lora.rank}"
    if config.model.moe.num_experts is not None:
        yield f"model.moe.num_experts=null, not {config.model.moe.num_experts}"
    if config.parallel.cp > 1:
        yield f"parallel.cp=1, not {config.parallel.cp}"
    if config.model.tied_embeddings and not policy.waits:
        yield (
            "model.tied_embeddings=false, or pipeline.weight_versions=double_buffer: other updates "
            "do not wait for what the first and the last stage add to a tied embedding"
        )
    if config.model.tied_embeddings and pipeline.schedule == "1f1b_rr":
        yield "model.tied_embeddings=false with pipeline.schedule=1f1b_rr"
    if config.model.dtype == "fp16":
        yield "model.dtype=bf16, fp32 or fp64, not fp16"
    if (
        optimizer.max_grad_norm is not None
        and optimizer.clip_scope == "global"
        and not policy.waits
    ):
        yield (
            "optimizer.clip_scope=stage (or optimizer.max_grad_norm=null), not global: updates do "
            "not wait for the norms of all stages"
        )
    if optimizer.zero > 1:
        yield f"optimizer.zero=0 or 1, not {optimizer.zero}"
    if optimizer.weight_prediction and not policy.follows:
        yield f"optimizer.weight_prediction=0, not {optimizer.weight_prediction}"
    if optimizer.weight_prediction and pipeline.lr_anneal_steps is not None:
        prediction = f"optimizer.weight_prediction={optimizer.weight_prediction}"
        yield f"pipeline.lr_anneal_steps=null with {prediction}"
    if optimizer.weight_prediction == "staleness" and pipeline.synchronous_steps is not None:
        yield "pipeline.synchronous_steps=null with optimizer.weight_prediction=staleness"
    if optimizer.master_weights != "fp32":
        yield f"optimizer.master_weights=fp32, not {optimizer.master_weights}"
    if optimizer.post_validation:
        yield "optimizer.post_validation=false"
    if not policy.follows and config.kernels.compile:
        yield "kernels.compile=false: a compiled backward reads the weights of its forward"
    if not policy.follows and (activations.policies != {"keep"} or activations.offload):
        yield "activations.policy=keep and activations.offload=[]"
    if (
        not policy.follows
        and pipeline.options.get("extra_warmup")
        and config.kernels.loss_chunk_tokens != 0
    ):
        yield (
            "kernels.loss_chunk_tokens=0 with pipeline.options.extra_warmup: a loss in chunks "
            "reads B's weights"
        )
    if config.train.batch_ramp is not None:
        yield "train.batch_ramp=null"
    if health.actions != {"stop"} or health.spike_factor is not None:
        yield "health.non_finite=stop and health.spike_factor=null"
    if health.replay_every:
        yield f"health.replay_every=0, not {health.replay_every}"
