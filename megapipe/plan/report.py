"""The plan of a run as text: what every process will hold and do, before a process is started."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from operator import attrgetter

from megapipe.config.config import Config
from megapipe.config.context import TURNED
from megapipe.layers.activation_policy import padded_vocabulary
from megapipe.layers.specs import local_numel_total
from megapipe.layout.activations import block_policies
from megapipe.layout.checks import shortened
from megapipe.layout.costs import stage_work
from megapipe.layout.layout import Layout
from megapipe.layout.sequence_slices import slice_time
from megapipe.layout.speeds import Speeds
from megapipe.model.interface import ModelSpec
from megapipe.model.partition import format_layout, from_counts, parse_layout, rank_loads
from megapipe.plan.communicators import communicators
from megapipe.plan.context_options import cost_of, option_of
from megapipe.plan.context_row import row
from megapipe.plan.figures import PlanFigures, most_sent, plan_figures
from megapipe.plan.memory_fit import memory_lines, size_text, step_time_lines
from megapipe.plan.moe.migration_traffic import migration_traffic
from megapipe.plan.traffic import REPLICA_TRAFFIC, CollectiveTraffic, pipeline_messages
from megapipe.plan.unit import SPLIT
from megapipe.plan.units import Units
from megapipe.schedule.async_schedules.async_schedule import (
    AsyncSchedule,
    moved_back,
    predictions_kept,
    versions_kept,
)
from megapipe.schedule.async_schedules.staleness import staleness
from megapipe.schedule.channels import channels
from megapipe.schedule.cost import Time
from megapipe.schedule.ir import Schedule
from megapipe.schedule.memory import peak_held, weight_replicas
from megapipe.schedule.render import text as draw
from megapipe.schedule.timing.simulate import Timeline
from megapipe.text import columns, count_noun
from megapipe.util.dtypes import DTYPE_BYTES


def report(config: Config, layout: Layout, imbalance: Fraction | None = None) -> str:
    """Return the plan of a resolved configuration as text; arguments and errors are those of
    :func:`plan_figures`."""
    return as_text(plan_figures(config, layout, imbalance))


def as_text(figures: PlanFigures) -> str:
    """Return a plan as text."""
    units, speeds, timeline = figures.units, figures.speeds, figures.timeline
    config, layout = units.config, units.layout
    parts = [
        [f"plan of {config.run.name}"],
        _model_lines(layout),
        [
            *_run_lines(units, speeds),
            *memory_lines(figures.memory, units, speeds, figures.imbalance),
            *_message_lines(figures),
            *step_time_lines(figures.time, config, layout, speeds),
        ],
        _stage_lines(config, layout, layout.schedule),
        _schedule_lines(config, layout, speeds, timeline),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def held_by_process(config: Config, layout: Layout, schedule: Schedule) -> list[int]:
    """Return the number of parameters, padding included, in each process along the pipeline axis.

    Processes that differ only in their dp, cp or tp index hold equally many parameters.
    """
    numbers: list[Sequence[int]] = [schedule.placement.stages_of(rank) for rank in range(layout.pp)]
    if layout.in_process:
        numbers = [range(layout.stages)]

    def held(stages: Sequence[int]) -> int:
        own = (layout.model.parameters(layout.stage_layers[stage]) for stage in stages)
        return local_numel_total(chain.from_iterable(own), layout.tp, *layout.ep_sizes)

    return [held(stages) for stages in numbers]


def _model_lines(layout: Layout) -> list[str]:
    model = layout.model
    return [
        f"model         {model.describe()}",
        f"vocabulary    {model.vocab_size:,}{_padded(layout)}",
        f"parameters    {model.num_parameters():,}{met_by_a_token(model)}",
    ]


def met_by_a_token(model: ModelSpec) -> str:
    """Return a remark on the active parameters of a token; empty if all are active."""
    active = model.active_parameters()
    return "" if active == model.num_parameters() else f", of which a token uses {active:,}"


def _padded(layout: Layout) -> str:
    """Return a remark on the padded vocabulary size; empty if no matrix is padded."""
    vocabulary = layout.model.vocab_size
    assert vocabulary is not None
    rows = (spec for spec in layout.model.parameters(layout.model.whole) if spec.multiple > 1)
    if not any(spec.shape[0] == vocabulary for spec in rows):
        return ""
    return f", padded to {padded_vocabulary(vocabulary, layout.tp):,}"


def _run_lines(units: Units, speeds: Speeds) -> list[str]:
    config, layout = units.config, units.layout
    train, schedule = config.train, layout.schedule
    held = held_by_process(config, layout, schedule)
    length = train.sequence_length
    tokens = train.tokens_per_step
    per_token = layout.model.token_flops()
    return [
        (
            f"mesh          pp {layout.pp} x dp {layout.dp} x cp {layout.cp} x tp {layout.tp}: "
            f"{layout.world:,} processes{_expert_ranks(config, layout)}"
        ),
        f"per process   {_range(held)} parameters{_sharded(config, layout)}",
        (
            f"step          {train.global_batch:,} samples x {length:,} = {tokens:,} tokens, in "
            f"{layout.microbatches:,} micro-batches of {train.microbatch} per replica"
        ),
        *([_slices_line(config, layout)] if schedule.slices > 1 else []),
        *(_context_lines(units, speeds) if layout.cp > 1 else []),
        (
            f"compute       {per_token * tokens:.4g} FLOPs per step, {per_token:.4g} per token, "
            f"{per_token * tokens / layout.world:.4g} per process and step on average"
        ),
        f"run           {train.steps:,} steps, {train.samples * length:,} tokens",
        *(f"note          {line}" for line in shortened(config)),
    ]


def changed_by_experts(config: Config) -> str:
    """Return a remark on settings of the section `experts` that change results; empty if none
    does."""
    codec, topology = config.experts.wire_dtype, config.experts.link_bandwidths
    rows = "" if codec == "none" else f", rows in {codec}"
    if topology is None:
        return rows
    return f"{rows}, balanced by bandwidths {', '.join(f'{each:g}' for each in topology)}"


def _expert_ranks(config: Config, layout: Layout) -> str:
    """Return a remark on how experts are split over ranks; empty if they are not."""
    if layout.ep_ranks == 1:
        return ""
    inner = f" x etp {layout.etp}" if layout.etp > 1 else ""
    chunks, slots = config.experts.number_of_chunks, config.experts.replica_slots
    how = config.experts.dispatch + (f" in {chunks} chunks" if chunks > 1 else "")
    how += f", {count_noun(slots, 'slot')} for replicas on each rank" if slots else ""
    how += changed_by_experts(config)
    return f", experts over ep {layout.ep}{inner} of a pipeline rank by {how}"


def _sharded(config: Config, layout: Layout) -> str:
    """Return a remark on the shard of the weights that a process keeps with ZeRO-3; empty below
    ZeRO-3."""
    if layout.replicas.zero < 3:
        return ""
    parts = config.optimizer.shard_group_size or layout.dp_cp
    copies = layout.edp if layout.model.experts() else layout.dp_cp
    experts = min(config.optimizer.shard_group_size or copies, copies)
    of_experts = f" (1/{experts} of the experts)" if experts != parts else ""
    return f", of which ZeRO-3 keeps 1/{parts}{of_experts} in memory between uses of a stage"


def _message_lines(figures: PlanFigures) -> list[str]:
    config, layout = figures.units.config, figures.units.layout
    schedule = layout.schedule
    wire = _by_axis(figures.wire) or "nothing"
    lines = [f"wire          maximum sent by a process in a step: {wire}"]
    lines += _expert_lines(config, layout, figures.traffic)
    if layout.in_process:
        return [*lines, "messages      within the process, without communicators"]
    made = [communicators(config, layout, rank) for rank in range(layout.pp)]
    ends, groups = [each.channels for each in made], [len(each.groups) for each in made]
    depth = max((channel.depth for channel in channels(schedule)), default=0)
    return [
        *lines,
        (
            f"messages      {_range(ends)} point-to-point communicators per process, and "
            f"{_range(groups)} for collectives; a channel holds at most "
            f"{count_noun(depth, 'received message')}"
        ),
        (
            f"sent          {_sent(config, layout):,} bytes between all pipeline ranks"
            f"{_in_shares(config, layout)}"
        ),
    ]


def _in_shares(config: Config, layout: Layout) -> str:
    """Return a remark on the part of a message that each tensor-parallel rank sends."""
    if layout.pp == 1 or layout.tp == 1 or config.parallel.sequence_parallel:
        return ""
    what = f"1/{layout.tp} of a message" if layout.scatters else "the whole message"
    return f": each of {layout.tp} tensor-parallel ranks sends {what} (pipeline.scatter_gather)"


def _slices_line(config: Config, layout: Layout) -> str:
    """Return a line on the lengths of slices, and on each slice's share of the time."""
    lengths = layout.slice_lengths
    shares = [f"{float(share):.1%}" for share in slice_time(config, layout.model).shares(lengths)]
    pipeline = config.pipeline
    overhead = pipeline.generator_options.slice_overhead_tokens
    by_flops = not overhead and pipeline.slice_attention_cost == 1
    return (
        f"slices        of {', '.join(map(str, lengths))} tokens, with {', '.join(shares)} of "
        + ("a layer's FLOPs" if by_flops else "the time of a whole sequence")
    )


def _context_lines(units: Units, speeds: Speeds) -> list[str]:
    """Return lines on the split of positions, on attention, and on the FLOPs of operations."""
    config, layout = units.config, units.layout
    split, context = layout.split, config.context
    parts = [f"{layout.local_length:,} of {config.train.sequence_length:,} positions per rank"]
    if split.ulysses > 1:
        parts.append(f"heads over {split.ulysses} ranks ({context.rank_order})")
    if split.ring > 1:
        travels = "queries" if layout.context.turned else "keys"
        back = f", the backward circulates {travels}" if context.algorithm in TURNED else ""
        parts.append(f"{context.algorithm} of {split.ring}, {context.position_split}{back}")
    attention = layout.model.kernel_needs.attention
    if attention is not None:
        scores = config.train.microbatch * attention.heads * layout.local_length
        stored = scores * config.train.sequence_length * DTYPE_BYTES[config.model.dtype]
        parts.append(f"scores are not stored (they would take {size_text(stored)} per layer)")
    F, I, W = (  # noqa: E741
        sum(units.flops(stage, what) for stage in range(layout.stages)) for what in SPLIT
    )
    return [
        f"context       {'; '.join(parts)}",
        *_attention_lines(config, layout, speeds),
        (
            f"operations    F : I : W = 1 : {I / F:.2f} : {W / F:.2f} by FLOPs of kernels "
            f"(scripts/schedule.py --cost F=1,I={I / F:.2f},W={W / F:.2f})"
        ),
    ]


def _attention_lines(config: Config, layout: Layout, speeds: Speeds) -> Iterator[str]:
    """Yield a line on the configured attention, with the headings and values of
    ``scripts/context.py compare``."""
    if layout.model.kernel_needs.attention is None:
        return
    known = speeds.tflops is not None
    cells = row(cost_of(config, speeds) if known else option_of(config))
    of = "a layer and micro-batch" + (" without slices" if layout.schedule.slices > 1 else "")
    values = ", ".join(f"{heading} {cell}" for heading, cell in cells.items() if cell != "-")
    yield f"attention     of {of}: {values}{'' if known else '; its time is not known'}"


def _expert_lines(
    config: Config, layout: Layout, exchanges: Iterable[Iterable[CollectiveTraffic]]
) -> list[str]:
    """Return lines on the bytes sent for expert replicas in a step, and for experts that move to
    other owners. `exchanges`: the step's traffic of each process."""
    lines, ranks = [], range(layout.pipeline_processes)
    sent = most_sent(exchanges, attrgetter("what"))
    if REPLICA_TRAFFIC[0] in sent:
        weights, gradients = (size_text(sent[what]) for what in REPLICA_TRAFFIC)
        lines.append(
            f"replicas      included above: {weights} of expert weights and {gradients} of their "
            "gradients, with all slots full; a change of replicas sends nothing more"
        )
    moved = (migration_traffic(config, layout, rank) for rank in ranks)
    if by_axis := _by_axis(most_sent(moved, attrgetter("axis"))):
        every = count_noun(config.experts.rebalance_every, "step")
        lines.append(f"owners        in addition, once in {every}, if all experts move: {by_axis}")
    return lines


def _by_axis(sizes: Mapping[str, Fraction]) -> str:
    """Format bytes by axis; empty if there are none."""
    return ", ".join(f"{axis} {size_text(size)}" for axis, size in sorted(sizes.items()))


def _sent(config: Config, layout: Layout) -> int:
    """Return the bytes of all pipeline messages of the job in a step."""
    sent = (pipeline_messages(config, layout, rank) for rank in range(layout.pp))
    return sum(each.bytes for own in sent for each in own) * layout.tp * layout.dp_cp


def _stage_lines(config: Config, layout: Layout, schedule: Schedule) -> list[str]:
    model = layout.model
    rows = [("stage", "rank", "holds", "parameters", "FLOPs")]
    total = model.forward_flops(model.whole)
    for stage, spec in enumerate(layout.stage_layers):
        rows.append(
            (
                str(stage),
                "+".join(map(str, schedule.placement.holders(stage))),
                model.contents(spec),
                f"{model.num_parameters(spec):,}",
                f"{model.forward_flops(spec) / total:.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{row[0]:>{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  "
        f"{row[3]:>{widths[3]}}  {row[4]:>{widths[4]}}"
        for row in rows
    ]
    counts = [len(spec.layers) for spec in layout.stage_layers]
    return [
        *lines,
        f"layers add up: {'+'.join(map(str, counts))} = {sum(counts)} of {model.layers}",
        *([_balance_line(config, layout)] if layout.stages > 1 else []),
        f"as a setting: pipeline.stage_layout={format_layout(layout.stage_layers)!r}",
    ]


def _balance_line(config: Config, layout: Layout) -> str:
    """Return a line on how even the ranks' work is, and how even it would be with equal layer
    counts."""
    F, B, _, _, R, *_ = layout.cost.table(layout.stages)
    chosen = _excess(layout, [sum(each) for each in zip(F, B, R, strict=True)])
    model, stages = layout.model, layout.stages
    layers = model.layers
    if layers < stages:
        return f"balance       {chosen} above the mean"
    counts = [layers * (i + 1) // stages - layers * i // stages for i in range(stages)]
    specs = parse_layout(
        from_counts(counts, ends=model.has_embedding_and_head),
        layers,
        ends=model.has_embedding_and_head,
    )
    recompute = layout.schedule.recompute
    spans = block_policies(config.activations, specs, recompute)
    work = stage_work(model, specs, spans, recompute)
    even = _excess(layout, [sum(each) for each in work])
    return f"balance       {chosen} above the mean; with layers split evenly {even}"


def _excess(layout: Layout, work: Sequence[Time]) -> str:
    """Return by how much the busiest rank and the slowest stage exceed the mean work."""
    loads = rank_loads(layout.schedule.placement, work)
    rank, stage = (max(each) * len(each) / sum(each) - 1 for each in (loads, work))
    return f"busiest rank {float(rank):.1%}, slowest stage {float(stage):.1%}"


def _schedule_lines(
    config: Config, layout: Layout, speeds: Speeds, timeline: Timeline
) -> list[str]:
    schedule = layout.run_schedule
    begins = " (where auto begins)" if config.pipeline.schedule == "auto" else ""
    operations = sum(map(len, schedule.ops))
    name = f"schedule {schedule.name}{begins}: {operations:,} operations, proved executable"
    unit = "in seconds, as assumed above"
    if speeds.tflops is None:
        unit = "with the FLOPs of each stage, 1 being a layer's forward"
    elif layout.in_process:
        unit += ", as if each rank were a process"
    held = ", ".join(map(str, peak_held(schedule)))
    first = config.pipeline.synchronous_steps
    lines = [
        f"{name}; drawn {unit}",
        *(
            _stream_lines(layout.async_schedule, schedule)
            if layout.async_schedule is not None
            else ()
        ),
        *(_tied_lines(layout) if layout.tied_embedding_is_linked else ()),
        *([f"synchronous steps at the start: {first}"] if first is not None else ()),
        f"maximum activations per rank, in micro-batches x 1/{layout.pp} of the model: {held}",
    ]
    copies = max(weight_replicas(schedule))
    if copies > 1 and not layout.in_process:
        lines.append(f"maximum weights per rank, in 1/{layout.pp} of the model: {copies}")
    return [*lines, draw(timeline, width=min(100, columns()))]


def _stream_lines(stream: AsyncSchedule, schedule: Schedule) -> list[str]:
    """Return lines on staleness and the number of weight versions, per stage."""
    ledger, kept, predicted = (
        staleness(schedule),
        versions_kept(stream),
        predictions_kept(stream),
    )
    moving = ", ".join(map(str, sorted(moved_back(stream))))
    behind = ", ".join(
        f"{float(each.mean):.3g}"
        + (f" ({each.least} to {each.most})" if each.least < each.most else "")
        for each in ledger
    )
    counts = ", ".join(str(kept[stage] + predicted.get(stage, 0)) for stage in sorted(kept))
    return [
        f"{stream.windows_of(schedule)} update windows are drawn; the schedule never flushes",
        f"mean staleness of a forward's weights, in updates, per stage: {behind}",
        f"weight versions per stage, including predicted and estimated older ones: {counts}",
        *([f"additional state at stages {moving}: velocity of the weights"] if moving else ()),
    ]


def _tied_lines(layout: Layout) -> list[str]:
    """Return a line on the stage that updates a tied embedding with separate buckets."""
    if not any(spec.tied for spec in layout.model.parameters(layout.stage_layers[0])):
        return []
    return ["the tied embedding is updated on the first stage, which sends it to the last"]


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
