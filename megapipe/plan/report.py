"""The plan of a run as text: what every process will hold and do, before any is started."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain
from operator import attrgetter

from megapipe.config.config import Config
from megapipe.config.context import TURNED
from megapipe.errors import ConfigError
from megapipe.layers.policy import padded_vocabulary
from megapipe.layers.specs import local_numel_total
from megapipe.layout.activations import block_policies
from megapipe.layout.checks import shortened
from megapipe.layout.costs import stage_work
from megapipe.layout.cuts import slice_time
from megapipe.layout.layout import Layout
from megapipe.layout.speeds import Speeds
from megapipe.model.interface import ModelSpec
from megapipe.model.partition import format_layout, from_counts, parse_layout, rank_loads
from megapipe.plan.communicators import communicators
from megapipe.plan.context_choice import cost_of, way_of
from megapipe.plan.context_row import row
from megapipe.plan.demand import memory_lines, size_text, step_time_lines
from megapipe.plan.moe.migration_traffic import migration_traffic
from megapipe.plan.pace import simulate_step
from megapipe.plan.traffic import (
    REPLICA_TRAFFIC,
    CollectiveTraffic,
    pipeline_messages,
    step_traffic,
)
from megapipe.plan.unit import SPLIT
from megapipe.plan.units import Units
from megapipe.schedule.channels import channels
from megapipe.schedule.cost import Time
from megapipe.schedule.ir import Schedule
from megapipe.schedule.memory import peak_held, weight_replicas
from megapipe.schedule.render import text as draw
from megapipe.schedule.streams.ledger import staleness
from megapipe.schedule.streams.stream import (
    AsyncSchedule,
    moved_back,
    predictions_kept,
    versions_kept,
)
from megapipe.schedule.timing.simulate import Timeline
from megapipe.util.dtypes import DTYPE_BYTES
from megapipe.words import columns, count_noun


def report(config: Config, layout: Layout, imbalance: Fraction | None = None) -> str:
    """The plan of a resolved configuration, with the memory of a rank whose experts get so many
    times the mean rows (:func:`megapipe.layout.moe.checks.check_imbalance`).

    Raises :class:`ConfigError` if the size of the vocabulary is not known yet or the stages hold
    other layers than the model has, and :class:`ScheduleError` if the schedule cannot be executed.
    """
    if config.model.vocab_size is None:
        raise ConfigError(
            f"model.vocab_size: not known without data.tokenizer={config.data.tokenizer}: "
            "set it for a plan"
        )
    placed = [layer for spec in layout.stage_layers for layer in spec.layers]
    if placed != list(range(layout.model.layers)):
        raise ConfigError(
            f"the stages hold layers {placed}, but the model has 0 to {layout.model.layers - 1}"
        )
    schedule = layout.schedule
    speeds = Speeds.of(config)
    units = Units(config, layout)
    timeline = simulate_step(units, speeds)
    parts = [
        [f"plan of {config.run.name}"],
        _model_lines(layout),
        [
            *_run_lines(units, speeds),
            *memory_lines(units, speeds, imbalance),
            *_message_lines(units),
            *step_time_lines(units, speeds, timeline),
        ],
        _stage_lines(config, layout, schedule),
        _schedule_lines(config, layout, speeds, timeline),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def held_by_process(config: Config, layout: Layout, schedule: Schedule) -> list[int]:
    """Parameters that a process keeps, padding included, per pipeline rank that is a process.

    Processes that differ only in dp, cp or tp keep equally many.
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
    """A remark on how many of its parameters a token meets, where that is not all."""
    active = model.active_parameters()
    return "" if active == model.num_parameters() else f", of which a token meets {active:,}"


def _padded(layout: Layout) -> str:
    """A remark on the rows to which matrices of a vocabulary are padded; empty where none are."""
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
    tokens = train.global_batch * length
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
    """A remark on what the section `experts` changes in results; empty where that is nothing."""
    codec, topology = config.experts.codec, config.experts.topology
    rows = "" if codec == "none" else f", rows in {codec}"
    if topology is None:
        return rows
    return f"{rows}, balanced by bandwidths {', '.join(f'{each:g}' for each in topology)}"


def _expert_ranks(config: Config, layout: Layout) -> str:
    """A remark on the ranks over which experts are split; empty where they are not."""
    if layout.ep_ranks == 1:
        return ""
    inner = f" x etp {layout.etp}" if layout.etp > 1 else ""
    chunks, slots = config.experts.number_of_chunks, config.experts.slots
    how = config.experts.dispatch + (f" in {chunks} chunks" if chunks > 1 else "")
    how += f", {count_noun(slots, 'slot')} for copies on each rank" if slots else ""
    how += changed_by_experts(config)
    return f", experts over ep {layout.ep}{inner} of a pipeline index by {how}"


def _sharded(config: Config, layout: Layout) -> str:
    """The share of a process' parameters that it keeps under ZeRO-3."""
    if layout.replicas.zero < 3:
        return ""
    parts = config.optimizer.shard_size or layout.dp_cp
    copies = layout.edp if layout.model.experts() else layout.dp_cp
    experts = min(config.optimizer.shard_size or copies, copies)
    of_experts = f" (of experts 1/{experts})" if experts != parts else ""
    return f", of which it keeps 1/{parts}{of_experts} of each stage between uses"


def _message_lines(units: Units) -> list[str]:
    config, layout = units.config, units.layout
    schedule = layout.schedule
    exchanges = [step_traffic(units, rank) for rank in range(layout.pipeline_processes)]
    wire = _most_by_axis(exchanges) or "nothing"
    lines = [f"wire          sent at most, per process and step: {wire}"]
    lines += _expert_lines(config, layout, exchanges)
    if layout.in_process:
        return [*lines, "messages      within the process: no communicators"]
    made = [communicators(config, layout, rank) for rank in range(layout.pp)]
    ends, groups = [each.channels for each in made], [len(each.groups) for each in made]
    depth = max((channel.depth for channel in channels(schedule)), default=0)
    return [
        *lines,
        (
            f"messages      {_range(ends)} point-to-point communicators per process, besides "
            f"{_range(groups)} for collectives; at most {depth} messages received ahead in one"
        ),
        (
            f"sent          {_sent(config, layout):,} bytes between all pipeline ranks"
            f"{_in_shares(config, layout)}"
        ),
    ]


def _in_shares(config: Config, layout: Layout) -> str:
    """A remark on what each tensor-parallel rank sends, where all of them have the same."""
    if layout.pp == 1 or layout.tp == 1 or config.parallel.sequence_parallel:
        return ""
    if layout.scatters:
        how = f"1/{layout.tp} by each of {layout.tp} tensor-parallel ranks"
    else:
        how = f"the same by each of {layout.tp} tensor-parallel ranks"
    return f": {how} (pipeline.scatter_gather)"


def _slices_line(config: Config, layout: Layout) -> str:
    """Where sequences are cut, and how even that is."""
    lengths = layout.slice_lengths
    shares = [f"{float(share):.1%}" for share in slice_time(config, layout.model).shares(lengths)]
    pipeline = config.pipeline
    by_flops = not pipeline.slice_overhead and pipeline.slice_attention == 1
    return (
        f"slices        of {', '.join(map(str, lengths))} tokens, with {', '.join(shares)} of "
        + ("a layer's FLOPs" if by_flops else "the time of a whole sequence")
    )


def _context_lines(units: Units, speeds: Speeds) -> list[str]:
    """How positions are split and attended to, and what that makes of a step's operations."""
    config, layout = units.config, units.layout
    split, context = layout.split, config.context
    parts = [f"{layout.local_length:,} of {config.train.sequence_length:,} positions per rank"]
    if split.ulysses > 1:
        parts.append(f"heads over {split.ulysses} ranks ({context.ranks})")
    if split.ring > 1:
        travels = "queries" if layout.context.turned else "keys"
        back = f", {travels} travel back" if context.plan in TURNED else ""
        parts.append(f"{context.plan} of {split.ring}, {context.order}{back}")
    scores = config.train.microbatch * config.model.heads // layout.tp * layout.local_length
    stored = scores * config.train.sequence_length * DTYPE_BYTES[config.model.dtype]
    parts.append(f"stored scores of a layer: 0 B, where s^2 / n would be {size_text(stored)}")
    F, I, W = (  # noqa: E741
        sum(units.flops(stage, what) for stage in range(layout.stages)) for what in SPLIT
    )
    return [
        f"context       {'; '.join(parts)}",
        *_way_lines(config, layout, speeds),
        (
            f"operations    F : I : W = 1 : {I / F:.2f} : {W / F:.2f} by FLOPs of kernels "
            f"(scripts/schedule.py --cost F=1,I={I / F:.2f},W={W / F:.2f})"
        ),
    ]


def _way_lines(config: Config, layout: Layout, speeds: Speeds) -> Iterator[str]:
    """The chosen way to attend, as ``scripts/context.py compare`` has it."""
    if layout.model.kernel_needs.attention is None:
        return
    known = speeds.tflops is not None
    cells = row(cost_of(config, speeds) if known else way_of(config))
    of = "a layer and micro-batch" + (" that is not cut" if layout.schedule.slices > 1 else "")
    told = ", ".join(f"{heading} {cell}" for heading, cell in cells.items() if cell != "-")
    yield f"attention     of {of}: {told}{'' if known else '; its time is not known'}"


def _expert_lines(
    config: Config, layout: Layout, exchanges: Iterable[Iterable[CollectiveTraffic]]
) -> list[str]:
    """Bytes that copies of experts take in a step, of the `exchanges` of each process, and experts
    that move when they do."""
    lines, ranks = [], range(layout.pipeline_processes)
    sent = _most(exchanges, attrgetter("what"))
    if REPLICA_TRAFFIC[0] in sent:
        weights, gradients = (size_text(sent[what]) for what in REPLICA_TRAFFIC)
        lines.append(
            f"copies        of these in each step {weights} of weights of experts and {gradients} "
            "of their gradients, with all slots full; other copies take no more"
        )
    if moved := _most_by_axis(migration_traffic(config, layout, rank) for rank in ranks):
        every = count_noun(config.experts.replan, "step")
        lines.append(f"owners        beside these at most once in {every}, of all experts: {moved}")
    return lines


def _most_by_axis(of_ranks: Iterable[Iterable[CollectiveTraffic]]) -> str:
    """Bytes that a process sends at most, by axis, as text."""
    sizes = sorted(_most(of_ranks, attrgetter("axis")).items())
    return ", ".join(f"{axis} {size_text(size)}" for axis, size in sizes)


def _most(
    of_ranks: Iterable[Iterable[CollectiveTraffic]], name: Callable[[CollectiveTraffic], str]
) -> dict[str, Fraction]:
    """Bytes that a process sends at most, by the name of exchanges."""
    most: dict[str, Fraction] = {}
    for exchanges in of_ranks:
        sent: dict[str, Fraction] = defaultdict(Fraction)
        for exchange in exchanges:
            sent[name(exchange)] += exchange.wire
        most |= {key: max(size, most.get(key, size)) for key, size in sent.items()}
    return most


def _sent(config: Config, layout: Layout) -> int:
    """Bytes of hidden states and their gradients in a step of the whole job."""
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
        f"the same stages: pipeline.layout={format_layout(layout.stage_layers)!r}",
    ]


def _balance_line(config: Config, layout: Layout) -> str:
    """How even the ranks' work is, and how even it would be with equally many layers per stage."""
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
    again = layout.schedule.recompute
    spans = block_policies(config.activations, specs, again)
    work = stage_work(model, specs, spans, again)
    even = _excess(layout, [sum(each) for each in work])
    return f"balance       {chosen} above the mean; with layers split evenly {even}"


def _excess(layout: Layout, work: Sequence[Time]) -> str:
    """By how much the busiest rank and the slowest stage are above the mean."""
    loads = rank_loads(layout.schedule.placement, work)
    rank, stage = (max(each) * len(each) / sum(each) - 1 for each in (loads, work))
    return f"busiest rank {float(rank):.1%}, slowest stage {float(stage):.1%}"


def _schedule_lines(
    config: Config, layout: Layout, speeds: Speeds, timeline: Timeline
) -> list[str]:
    schedule = layout.run_schedule
    begins = ", with which auto begins" if config.pipeline.schedule == "auto" else ""
    operations = sum(map(len, schedule.ops))
    name = f"schedule {schedule.name}{begins}: {operations:,} operations, proved executable"
    unit = "in seconds, as assumed above"
    if speeds.tflops is None:
        unit = "with the FLOPs of each stage, 1 being a layer's forward"
    elif layout.in_process:
        unit += ", as if each rank had a process of its own"
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
        *([f"the first steps are synchronous: {first}"] if first is not None else ()),
        f"activations held at most, in micro-batches of a full rank, per rank: {held}",
    ]
    copies = max(weight_replicas(schedule))
    if copies > 1 and not layout.in_process:
        lines.append(f"weights held {copies} times")
    return [*lines, draw(timeline, width=min(100, columns()))]


def _stream_lines(stream: AsyncSchedule, schedule: Schedule) -> list[str]:
    """How stale weights are, and how many versions are kept, by stage."""
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
        f"{stream.windows_of(schedule)} steps of it, which never flushes, are drawn",
        f"weights a forward reads are behind, in updates on average, per stage: {behind}",
        f"weights kept, predicted and moved back ones included, per stage: {counts}",
        *([f"one more state, the velocity of the weights, at stages {moving}"] if moving else ()),
    ]


def _tied_lines(layout: Layout) -> list[str]:
    """Who updates a tied embedding whose stages have buckets of their own."""
    if not any(spec.tied for spec in layout.model.parameters(layout.stage_layers[0])):
        return []
    return ["the tied embedding is updated on the first stage, which sends it to the last"]


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
