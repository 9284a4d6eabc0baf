"""Makes a layout from a configuration: everything that depends on several keys together.

:func:`resolve` fills in what depends on other keys and proves that the sizes fit each other, before
any process group exists. It imports no torch.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from megapipe.config.config import Config
from megapipe.config.parallel import ParallelConfig
from megapipe.config.pipeline import PipelineConfig
from megapipe.config.unused_keys import check_effects
from megapipe.errors import ConfigError, MegapipeError, ScheduleError
from megapipe.layout.activations import block_policies, recomputed_stages, uniform_recompute
from megapipe.layout.async_schedule import async_schedule_of
from megapipe.layout.checks import check, check_compile, check_slices, check_urls
from megapipe.layout.context_checks import check_context, split_of
from megapipe.layout.context_plan import context_plans
from megapipe.layout.costs import relative_cost, stage_work
from megapipe.layout.devices import device_kind
from megapipe.layout.elastic_layouts import elastic_config, ranks_per_replica
from megapipe.layout.key_effects import check_keep_attention, check_slice_times
from megapipe.layout.layout import DeviceKind, Layout
from megapipe.layout.measurements import Measurements
from megapipe.layout.model_spec import model_spec_of, resolved_lora, resolved_model
from megapipe.layout.moe.checks import check_pieces
from megapipe.layout.moe.dispatch import check_dispatch, resolved_experts
from megapipe.layout.p2p import sends_tuples, uses_scatter_gather
from megapipe.layout.sequence_slices import balanced_slices_for, fastest_slices_for, is_cut_by_time
from megapipe.layout.speeds import pipeline_speeds, resolved_plan
from megapipe.layout.unequal import check_unequal, in_order
from megapipe.layout.zero_stage import max_replicas, replica_policy
from megapipe.model.interface import ModelSpec
from megapipe.model.partition import StageSpec, balanced, from_counts, parse_layout
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import gpipe_on
from megapipe.schedule.generators.op_lists import split_backwards
from megapipe.schedule.ir import Schedule
from megapipe.schedule.load import is_user_schedule, load, takes_option
from megapipe.schedule.lower import check_trainable
from megapipe.schedule.memory import peak_held, peak_weighted
from megapipe.schedule.placement import Placement, loop
from megapipe.schedule.proof.validate import validate
from megapipe.text import nearest_multiples

BYTE_VOCABULARY = 257
"""Size of the byte tokenizer's vocabulary: 256 bytes and the end-of-document mark."""

MOST_PASSES = 4_000_000
"""Maximum number of (micro-batch, stage) pairs in a step; a schedule lists each pair."""


def resolve(
    config: Config,
    world: int | None,
    vocab_size: int | None,
    *,
    where: str = "configuration",
    device: DeviceKind | None = None,
    before: Layout | None = None,
    measure: Measurements | None = None,
) -> tuple[Config, Layout]:
    """Return `config` with every dependent default filled in, and the layout that it describes.

    `world`: number of processes. None, if there is no launcher: ``plan.gpus``, or else as many as
    the layout needs.

    `vocab_size`: size of the tokenizer's vocabulary. None: only the byte tokenizer's size is known,
    without loading a tokenizer. If the size is unknown, ``model.vocab_size`` stays None, and the
    default partition counts the head as one layer until the configuration is resolved with the
    tokenizer's size; a schedule that depends on costs then has one micro-batch.

    `device`: kind of device of the run. None: as far as it is known without torch
    (:func:`~megapipe.layout.devices.device_kind`).

    `before`: the layout that an earlier call has made for `config`, if any. Making and proving a
    schedule may take seconds, so the earlier layout's schedule is reused unless the tokenizer or
    the device changes it.

    `measure`: functions that run stages without values. They measure the fraction of a
    micro-batch's activations that an I frees, if a schedule or a memory limit depends on it, and
    resolve ``experts.dispatch=auto`` and ``experts.overlap_chunks=auto``. If they are needed and
    missing, a schedule that depends on costs has one micro-batch, memory limits are not checked,
    and `auto` stays: the layout then dispatches rows in one chunk.

    Raises :class:`ConfigError`, also for a wrong number of processes, in one line that begins with
    the text `where`.
    """
    try:
        return _resolve(config, world, vocab_size, device, before, measure)
    except MegapipeError as error:
        raise type(error)(f"{where}: {error}") from None


def _resolve(
    given: Config,
    world: int | None,
    vocab_size: int | None,
    device: DeviceKind | None,
    before: Layout | None,
    measure: Measurements | None,
) -> tuple[Config, Layout]:
    check_urls(given)
    if vocab_size is None and given.data.tokenizer == "byte":
        vocab_size = BYTE_VOCABULARY
    number, named = world, f"world size {world}"
    if world is None:
        number, named = given.plan.gpus, f"plan.gpus={given.plan.gpus}"
    given = elastic_config(given, number, named)
    model = resolved_model(given, vocab_size)
    parallel, processes = _resolved_mesh(given, number, named, launched=world is not None)
    dp = parallel.dp or 1
    lora = resolved_lora(given.lora, model)
    config = given.model_copy(update={"model": model, "parallel": parallel, "lora": lora})
    config = config.model_copy(update={"plan": resolved_plan(given)})
    check_effects(given)
    device = device or device_kind(config)
    config = config.model_copy(update={"experts": resolved_experts(config)})
    same = before is not None and config == given and device == before.device
    if same and before is not None and (before.is_final or measure is None):
        return config, before
    family = model_spec_of(config, device)
    check(config, family, dp, processes)
    check_unequal(config, processes)
    microbatches = _microbatches(config, dp)
    stream = async_schedule_of(config, microbatches)
    # a schedule that depends on costs is made when the stages are known; a short one has its
    # placement
    by_time = is_cut_by_time(config)
    by_cost = by_time or takes_option(config.pipeline.schedule, "cost")
    if before is not None and not by_cost:
        schedule = before.schedule
    else:
        short = by_cost and not is_user_schedule(config.pipeline.schedule)
        schedule = _recomputing(config, _schedule(config, 1 if short else microbatches))
    check_compile(config, schedule.slices)
    check_slices(config, family, schedule.slices)
    check_slice_times(config, is_cut=by_time or schedule.slices > 1)
    check_pieces(config, slices=schedule.slices, halves=bool(schedule.sizes))
    split = split_of(config)
    attention = family.kernel_needs.attention
    check_context(config, split, schedule.slices, attention)
    stages = _partition(config, family, schedule.placement)
    tuples = sends_tuples(config, family, stages)
    scatter = uses_scatter_gather(config, tuples)
    spans = block_policies(config.activations, stages, schedule.recompute)
    check_keep_attention(config.activations, spans, schedule.recompute)
    work = stage_work(family, stages, spans, schedule.recompute)
    if by_time and model.vocab_size is not None:
        whole = relative_cost(config, family, work, ())
        slice_lengths = fastest_slices_for(config, family, microbatches, whole)
    else:
        slice_lengths = balanced_slices_for(config, family, schedule.slices)
    cost = relative_cost(config, family, work, slice_lengths)
    of_experts = dp * parallel.cp * parallel.tp // (parallel.ep * parallel.etp)
    layout = Layout(
        dp=dp,
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        ranks_per_node=config.experts.ranks_per_node
        if config.experts.dispatch == "hierarchical"
        else None,
        microbatches=microbatches,
        world=processes,
        device=device,
        in_process=config.pipeline.transport == "in_process",
        model=family,
        stage_layers=stages,
        sends_tuples=tuples,
        scatters=scatter,
        slice_lengths=slice_lengths,
        loss_chunk=family.conditions.loss_chunk,
        split=split,
        context=context_plans(config, split, attention),
        replicas=replica_policy(
            config.optimizer,
            max_replicas(family, dp * parallel.cp, of_experts),
            loss_chunk=family.conditions.loss_chunk,
        ),
        schedule=schedule,
        ramp_schedules={},
        block_policies=spans,
        freed_by_input_grad=Fraction(0),
        is_final=False,
        cost=cost,
        async_schedule=stream,
    )
    if config.experts.is_open and measure is not None:
        config = _with_experts(config, layout, measure)
    slices = len(slice_lengths) if by_time else None
    unknown = config.experts.is_open or (measure is None and counts_freed(config))
    if model.vocab_size is None or unknown:
        _prove(config, schedule, before)
        return config, replace(layout, ramp_schedules=_smaller(config, layout, slices, final=False))
    if measure is not None and counts_freed(config) and len(slice_lengths) == 1:
        layout = replace(layout, freed_by_input_grad=measure.freed(config, layout))
    if by_cost:
        known = before is not None and (before.cost, before.freed_by_input_grad) == (
            cost,
            layout.freed_by_input_grad,
        )
        if before is not None and known and before.schedule.whole_microbatches == microbatches:
            schedule = before.schedule
        else:
            ordered = _schedule(config, microbatches, cost, slices, layout.freed_by_input_grad)
            schedule = _recomputing(config, ordered)
        layout = replace(layout, schedule=schedule)
    _prove(config, schedule, before)
    _check_memory(config, schedule, layout.freed_by_input_grad)
    smaller = _smaller(config, layout, slices, final=True)
    return config, replace(layout, ramp_schedules=smaller, is_final=True)


def _with_experts(config: Config, layout: Layout, measure: Measurements) -> Config:
    """Replace every `auto` in the section `experts` by a measured choice, and check the section."""
    found = measure.experts(config, layout)
    config = config.model_copy(
        update={"experts": config.experts.model_copy(update=found._asdict())}
    )
    check_dispatch(config)
    return config


def counts_freed(config: Config) -> bool:
    """Whether a schedule or a limit depends on the fraction of activations that an I frees."""
    pipeline = config.pipeline
    if pipeline.activation_limit is not None or pipeline.schedule == "auto":
        return True
    return takes_option(pipeline.schedule, "freed")


def _prove(config: Config, schedule: Schedule, before: Layout | None) -> None:
    """Prove that the schedule can be executed, unless the layout `before` has the same schedule."""
    if before is not None and schedule is before.schedule:
        return
    try:
        validate(schedule)
    except ScheduleError as error:
        raise ConfigError(f"pipeline.schedule={config.pipeline.schedule}: {error}") from None


def _resolved_mesh(
    config: Config, world: int | None, named: str, *, launched: bool
) -> tuple[ParallelConfig, int]:
    """Return the section `parallel` with dp filled in, and the number of processes. `world`: given
    number of processes; None: as many as the layout needs. `named`: text for `world` in errors.
    `launched`: whether a launcher has started the processes."""
    parallel = config.parallel
    if parallel.backend == "nccl" and parallel.device == "cpu":
        raise ConfigError("parallel.backend=nccl needs parallel.device=cuda, not cpu")
    if config.pipeline.transport == "in_process":
        factors = f"cp {parallel.cp} x tp {parallel.tp} (the pipeline runs in each process)"
    else:
        factors = f"pp {parallel.pp} x cp {parallel.cp} x tp {parallel.tp}"
    inner = ranks_per_replica(config)
    if world is None:
        dp = parallel.dp or 1
    elif parallel.dp is None:
        if world % inner:
            raise ConfigError(
                f"{named} does not divide into {factors}: expected a multiple of {inner}"
                f"{_start_with(inner) if launched else ''}"
            )
        dp = world // inner
    else:
        dp = parallel.dp
        if world != dp * inner:
            raise ConfigError(
                f"{named} for dp {dp} x {factors}: expected {dp * inner}"
                f"{_start_with(dp * inner) if launched else ''}"
            )
    return parallel.model_copy(update={"dp": dp}), dp * inner


def _start_with(world: int) -> str:
    """Return the end of an error message: a command that starts `world` processes, on nodes of
    eight ranks if possible."""
    if world > 8 and world % 8 == 0:
        where = f"--nnodes {world // 8} --nproc 8 --rdzv-endpoint HOST:PORT --rdzv-id ID"
    else:
        where = f"--nproc {world}"
    return f"; start with python -m megapipe.launch {where} -m megapipe train ..."


def _microbatches(config: Config, dp: int) -> int:
    train = config.train
    per_round = train.microbatch * dp
    if train.global_batch % per_round:
        raise ConfigError(
            f"train.global_batch={train.global_batch} is not divisible by train.microbatch="
            f"{train.microbatch} x dp {dp} = {per_round}: "
            f"{nearest_multiples(train.global_batch, per_round)}"
        )
    if train.batch_ramp is not None:
        _check_ramp(config, train.batch_ramp, per_round)
    return train.global_batch // per_round


def _check_ramp(config: Config, ramp: Sequence[int], per_round: int) -> None:
    train, (start, increment, _) = config.train, ramp
    where = f"train.batch_ramp={list(ramp)}"
    if start >= train.global_batch or (train.global_batch - start) % increment:
        raise ConfigError(
            f"{where}: steps of {increment} do not lead from {start} to train.global_batch="
            f"{train.global_batch}"
        )
    for size, what in ((start, "start"), (increment, "increment")):
        if size % per_round:
            raise ConfigError(
                f"{where}: {what} {size} is not divisible by train.microbatch x dp = {per_round}: "
                f"{nearest_multiples(size, per_round)}"
            )
    if config.pipeline.schedule == "auto":
        raise ConfigError(
            f"{where}: pipeline.schedule=auto searches an order for one number of "
            "micro-batches: expected train.batch_ramp=null, or another pipeline.schedule"
        )


def _smaller(
    config: Config, layout: Layout, slices: int | None, *, final: bool
) -> dict[int, Schedule]:
    """Make and prove the schedules for the smaller batches of ``train.batch_ramp``, by batch size.
    `slices`: number of slices if the configuration leaves it open. With `final` the schedules must
    keep the activation limit."""
    found, like = {}, layout.schedule
    for batch in config.train.batches.sizes[:-1]:
        microbatches = batch // (config.train.microbatch * layout.dp)
        try:
            ordered = _schedule(
                config, microbatches, layout.cost, slices, layout.freed_by_input_grad
            )
            schedule = _recomputing(config, ordered)
            _prove(config, schedule, None)
            if final:
                _check_memory(config, schedule, layout.freed_by_input_grad)
        except ConfigError as error:
            raise ConfigError(f"train.batch_ramp: a batch of {batch} samples: {error}") from None
        if schedule.placement != like.placement or schedule.recompute != like.recompute:
            raise ConfigError(
                f"train.batch_ramp: pipeline.schedule={config.pipeline.schedule} has another "
                f"placement for a batch of {batch} samples than for {config.train.global_batch}"
            )
        found[batch] = schedule
    return found


def _partition(config: Config, family: ModelSpec, placement: Placement) -> tuple[StageSpec, ...]:
    chosen, stages, ends = (
        config.pipeline.stage_layout,
        placement.stages,
        family.has_embedding_and_head,
    )
    if chosen is None:
        text = balanced(
            family.unit_costs(uniform_recompute(config.activations)),
            placement,
            ends=ends,
            speeds=pipeline_speeds(config),
        )
    else:
        text = chosen if isinstance(chosen, str) else from_counts(chosen, ends=ends)
    specs = parse_layout(text, family.layers, ends=ends)
    if len(specs) != stages:
        raise ConfigError(
            f"pipeline.stage_layout={text!r} has {len(specs)} stages: expected {stages}, as "
            f"pipeline.schedule={config.pipeline.schedule} has on parallel.pp={config.parallel.pp} "
            "ranks"
        )
    return specs


def _schedule(
    config: Config,
    microbatches: int,
    cost: Cost | None = None,
    slices: int | None = None,
    freed: Fraction | None = None,
) -> Schedule:
    """Make the schedule. Without `cost`, a schedule that depends on costs has the right placement,
    but not the final order. `slices`: number of slices if the configuration leaves it open.
    `freed`: fraction of a micro-batch's activations that an I frees."""
    pipeline, pp = config.pipeline, config.parallel.pp
    passes = microbatches * pp * (pipeline.chunks or 1)
    if passes > MOST_PASSES:
        raise ConfigError(
            f"train.global_batch={config.train.global_batch} makes {microbatches} "
            f"micro-batches through {pp * (pipeline.chunks or 1)} stages: expected a product of at "
            f"most {MOST_PASSES}; raise train.microbatch"
        )
    try:
        if pipeline.schedule == "two_group" and pipeline.weight_versions != "synchronous":
            schedule = gpipe_on(loop(pp, 2), microbatches)
        elif pipeline.schedule == "auto":
            schedule = _begin_auto(pipeline, pp, microbatches)
        else:
            schedule = load(
                pipeline.schedule,
                ranks=pp,
                microbatches=microbatches,
                **{**pipeline.arguments, "slices": slices or pipeline.sequence_slices},
                activation_limit=pipeline.activation_limit,
                cost=cost,
                freed=freed,
            )
        check_trainable(schedule)
    except ScheduleError as error:
        raise ConfigError(f"pipeline.schedule={pipeline.schedule}: {error}") from None
    schedule = in_order(config, schedule)
    rows = config.train.microbatch
    for size in schedule.sizes or ():
        if (rows * size).denominator > 1:
            raise ConfigError(
                f"train.microbatch={rows} cannot be cut as pipeline.schedule={pipeline.schedule} "
                f"cuts it: expected a multiple of {size.denominator}"
            )
    return schedule


def _recomputing(config: Config, schedule: Schedule) -> Schedule:
    """Add the stages with ``activations.policy=stage`` to those that the schedule recomputes."""
    stages = recomputed_stages(config.activations, schedule.placement.stages)
    name = config.pipeline.schedule
    if schedule.slices > 1 and (stages or config.activations.offload):
        key = "policy=stage" if stages else f"offload={config.activations.offload}"
        raise ConfigError(
            f"activations.{key}: pipeline.schedule={name} cuts sequences into slices, which "
            "share keys and values: expected another activations.policy, and no "
            "activations.offload"
        )
    if stages and name == "auto":
        raise ConfigError(
            "activations.policy=stage: pipeline.schedule=auto searches orders of stages that keep "
            "their activations: expected keep, selective or full"
        )
    return replace(schedule, recompute=schedule.recompute | stages) if stages else schedule


def _check_memory(config: Config, schedule: Schedule, freed: Fraction) -> None:
    """Check that every rank keeps ``activation_limit``. `freed`: fraction of a micro-batch's
    activations that an I frees."""
    limit = config.pipeline.activation_limit
    if limit is None:
        return
    held = peak_weighted(schedule, freed)
    rank = max(range(len(held)), key=held.__getitem__)
    if held[rank] > limit:
        raise ConfigError(
            f"pipeline.activation_limit={limit:g}: schedule {schedule.name} holds the activations "
            f"of {float(held[rank]):g} micro-batches on rank {rank}: expected a limit of at least "
            "that"
        )


def _begin_auto(pipeline: PipelineConfig, ranks: int, microbatches: int) -> Schedule:
    """Return the schedule with which ``schedule=auto`` measures costs: of the candidates for
    ``pipeline.placement`` the first that keeps the activation limit, or else the last."""
    chunks, limit = pipeline.chunks, pipeline.activation_limit
    if pipeline.placement == "v":
        names = ["zb_v", "v_half", "v_min"]
    elif pipeline.placement == "wave":
        names, chunks = ["hanayo"], chunks or 4
    elif (chunks or 1) > 1:
        names = ["interleaved_1f1b"]
    else:
        names = ["zb_h1", "zb_1p"]
    schedules = (
        load(name, ranks=ranks, microbatches=microbatches, chunks=chunks, activation_limit=limit)
        for name in names
    )
    for schedule in schedules:
        if limit is None or max(peak_held(schedule)) <= limit:
            break
    return split_backwards(schedule)
