"""The cases of the parity matrix: each is one layout, and how it trains one small model."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from megapipe.config.config import Config
from megapipe.config.moe import MoEConfig
from megapipe.distributed.mesh import Grid
from megapipe.layout.layout import Layout
from megapipe.layout.model_spec import model_spec_of
from megapipe.layout.resolve import resolve
from megapipe.plan.measurements import BY_UNITS
from megapipe.schedule.generators import build
from tests.parity import reference
from tests.parity.named_settings import ACTIVATIONS, ADAPTED, CONTEXTS, MODELS, MOE, PLACEMENTS
from tests.parity.random_owners import pool_file

STEPS = 2
"""Number of steps of a case. Each is checked by itself, from what the ranks had before it: the
first from zero states, the second from other ones. Cases in which something takes turns have
more."""
LR = 1e-3
"""Peak learning rate. Adam moves a weight whose true gradient is zero (a key bias) by rounding
errors of about 1e-17 x lr / eps; at this rate that stays under the tolerance."""
SLOW = 1e-9
"""TFLOP/s of a device on which expert replicas, or moves of experts, take less time than rows."""
END = 5
"""The token that ends a document."""


@dataclass(frozen=True)
class Switch:
    """What the tests know of a field of :class:`Case`."""

    key: str
    """Configuration key that it sets, or section that it selects; "" if neither."""
    direct: bool
    """Whether the key takes the value unchanged."""
    layout: bool
    """Whether it only changes the layout of the same training: the reference does not have it."""
    values: tuple[Any, ...]
    """Values in the parity matrix, the plain one first."""
    dimension: str
    """Dimension of the parity matrix that sets several fields together."""
    elsewhere: str
    """Why the parity matrix does not vary it, or which test does."""


def switch(
    default: Any,
    key: str = "",
    *,
    direct: bool = True,
    layout: bool = False,
    values: Sequence[Any] = (),
    dimension: str = "",
    elsewhere: str = "",
) -> Any:
    """Declare a field of :class:`Case`; see :class:`Switch`."""
    assert sum(map(bool, (values, dimension, elsewhere))) == 1
    about = Switch(key, direct and bool(key), layout, tuple(values), dimension, elsewhere)
    return field(default=default, metadata={"switch": about})


BINARY = (False, True)
SIZE = "a size"
RULES = (
    "adamw",
    "adam",
    "sgd",
    "lion",
    "muon",
    "lars",
    "lamb",
    "rmsprop",
    "nadamw",
    "adabelief",
    "adam3",
)


@dataclass(frozen=True)
class Case:
    """One layout of one small model. Defaults are the plainest."""

    dp: int = switch(1, "parallel.dp", dimension="layout", layout=True)
    cp: int = switch(1, "parallel.cp", dimension="layout", layout=True)
    context: str = switch(
        "ring",
        "context",
        direct=False,
        layout=True,
        values=[name for name in CONTEXTS if name != "own"],
    )
    """Name in CONTEXTS; has an effect if positions are split."""
    tp: int = switch(1, "parallel.tp", dimension="layout", layout=True)
    pp: int = switch(1, "parallel.pp", dimension="layout", layout=True)
    schedule: str = switch("1f1b", "pipeline.schedule", dimension="schedule", layout=True)
    chunks: int | None = switch(None, "pipeline.chunks", dimension="schedule", layout=True)
    m: int = switch(2, "train.global_batch", direct=False, values=(2, 1, 3, 4, 5, 6, 7, 8, 9))
    group: int | None = switch(
        None,
        "pipeline.options.microbatch_group_size",
        layout=True,
        elsewhere="follows from the schedule and m; all values: test_schedules",
    )
    slices: int | None = switch(None, "pipeline.sequence_slices", dimension="schedule", layout=True)
    lengths: tuple[int, ...] | None = switch(None, layout=True, elsewhere="test_slices")
    """Lengths of the slices; they replace the layout's."""
    slice_overhead: float | None = switch(
        None, "pipeline.options.slice_overhead_tokens", layout=True, elsewhere="test_slices"
    )
    slice_attention: float = switch(
        1.0, "pipeline.slice_attention_cost", layout=True, elsewhere="test_slices"
    )
    pairs: int | None = switch(
        None, "pipeline.options.chimera_pairs", layout=True, elsewhere="test_schedules"
    )
    replicas: tuple[int, ...] | None = switch(
        None, "pipeline.options.ranks_per_stage", layout=True, elsewhere="test_schedules"
    )
    advance: int | None = switch(
        None, "pipeline.options.extra_warmup", layout=True, elsewhere="test_schedules"
    )
    weights: str = switch("synchronous", "pipeline.weight_versions", elsewhere="test_stream_pairs")
    """Which weight versions operations read; without a flush `tests.parity.async_reference` is the
    reference."""
    horizon: str = switch("update", "pipeline.prediction_horizon", elsewhere="test_stream_pairs")
    """Horizon of the weights "predict"."""
    correction: float | None = switch(None, "pipeline.velocity_decay", elsewhere="test_streams")
    """Velocity decay of the weights "correct"."""
    lr_anneal_steps: int | None = switch(
        None, "pipeline.lr_anneal_steps", elsewhere="test_stream_pairs"
    )
    synchronous_steps: int | None = switch(
        None, "pipeline.synchronous_steps", elsewhere="test_stream_pairs"
    )
    swap: bool = switch(False, elsewhere="test_schedules")
    """Whether gpipe runs instead, with the schedule's placement, replicas, slices and parts."""
    in_process: bool = switch(False, "pipeline.transport", direct=False, layout=True, values=BINARY)
    scatter: str = switch("off", "pipeline.scatter_gather", layout=True, values=("off", "on"))
    sequence_parallel: bool = switch(
        False, "parallel.sequence_parallel", layout=True, values=BINARY
    )
    zero: int = switch(1, "optimizer.zero", layout=True, values=(1, 0, 2, 3))
    shard_size: int | None = switch(
        None, "optimizer.shard_group_size", layout=True, values=(None, 1, 2)
    )
    prefetch: int = switch(1, "optimizer.weight_prefetch", layout=True, values=(1, 0))
    reduce_dtype: str | None = switch(
        None, "optimizer.reduce_dtype", layout=True, values=(None, "fp32", "bf16")
    )
    reduce_chunk_mib: float | None = switch(
        None, "optimizer.bucket_mib", layout=True, values=(None, 1e-6)
    )
    rule: str = switch("adamw", "optimizer.rule", values=RULES)
    look_ahead: int | str = switch(0, "optimizer.weight_prediction", values=(0, 2))
    state_dtype: str = switch("fp32", "optimizer.state_dtype", dimension="state")
    master: str = switch("fp32", "optimizer.master_weights", dimension="state")
    rounding: str = switch("stochastic", "optimizer.rounding", dimension="state")
    offload: str = switch("none", "optimizer.offload", layout=True, values=("none", "host", "disk"))
    post_validation: bool = switch(False, "optimizer.post_validation", layout=True, values=BINARY)
    activations: str = switch(
        "keep",
        "activations",
        direct=False,
        layout=True,
        values=(
            *("keep", "stage", "full, two together", "of each some", "experts again"),
            "full, attention kept",
        ),
    )
    loss_chunk: int | None = switch(None, "kernels.loss_chunk_tokens", values=(None, 0, 5))
    compile: bool = switch(False, "kernels.compile", layout=True, values=BINARY)
    overlap: bool = switch(
        True, "kernels.tp_comm_overlap", elsewhere="changes no bit: test_overlap"
    )
    moe: str | None = switch(
        None,
        "model.moe",
        direct=False,
        values=(
            *(None, "top 2", "top 1, capacity 1", "capacity, choice", "capacity, position"),
            *("capacity, score", "groups", "shared, gated", "step", "random", "sixteen"),
            *("pyramid", "pyramid, biased"),  # the former has a residual
            *("residual", "gshard", "sliced", "step, first", "every second"),
        ),
    )
    """Name in MOE: layers with experts."""
    ep: int = switch(1, "parallel.ep", dimension="experts", layout=True)
    etp: int = switch(1, "parallel.etp", dimension="experts", layout=True)
    grouped: bool = switch(False, "kernels.only.expert_gemm", direct=False, values=BINARY)
    """Whether one kernel computes the products of all experts."""
    dispatch: str = switch("all_to_all", "experts.dispatch", dimension="dispatch", layout=True)
    node: int | None = switch(None, "experts.ranks_per_node", dimension="dispatch", layout=True)
    """Ranks of a node, for hierarchical dispatch or a topology with nodes."""
    expert_chunks: int = switch(1, "experts.overlap_chunks", layout=True, values=(1, 3))
    pad: bool = switch(False, "experts.pad_to_capacity", layout=True, values=BINARY)
    """Whether experts have room for the largest possible number of rows."""
    codec: str = switch(
        "none", "experts.wire_dtype", direct=False, layout=True, values=("none", "bf16", "int8")
    )
    """Wire type of dispatched rows."""
    topology: tuple[float, ...] | None = switch(
        None,
        "experts.link_bandwidths",
        layout=True,
        elsewhere="goes by the rank of a sequence: test_topology",
    )
    """Bandwidths that weight the auxiliary loss."""
    placement: str = switch(
        "static",
        "experts.rebalance",
        direct=False,
        layout=True,
        values=("static", "changing", "migrating"),
    )
    """Name in PLACEMENTS: which ranks have which experts."""
    lora: str | None = switch(None, "lora", direct=False, values=(None, *ADAPTED))
    """Name in ADAPTED: the layers beside which adapters are trained."""
    model: str = switch(
        "gpt2",
        "model",
        direct=False,
        values=("gpt2", "llama", "mixed", "qwen", "neox", "bloom", "capped", "gemma"),
    )
    tied: bool = switch(True, "model.tied_embeddings", values=(True, False))
    uneven: bool = switch(False, "pipeline.stage_layout", direct=False, layout=True, values=BINARY)
    vocab: int = switch(300, "model.vocab_size", values=(300, 512))
    kv_heads: int | None = switch(None, "model.kv_heads", values=(None, 2))
    masked: float = switch(0.0, values=(0.0, 0.4))
    documents: bool = switch(False, "data.document_mask", values=BINARY)
    """Whether attention ends at documents, of about four tokens."""
    dtype: str = switch("fp64", "model.dtype", values=("fp64", "fp32", "bf16", "fp16"))
    loss_scale: float | None = switch(
        None,
        "optimizer.loss_scale",
        elsewhere="one at which fp16 does not overflow; dynamic ones: test_fp16",
    )
    """Constant loss scale, for fp16."""
    dropout: float = switch(0.0, "model.dropout", values=(0.0, 0.2))
    clip: float | None = switch(0.05, "optimizer.max_grad_norm", values=(0.05, None))
    clip_scope: str = switch("global", "optimizer.clip_scope", elsewhere="test_stream_pairs")
    debug: bool = switch(False, "pipeline.debug", layout=True, values=BINARY)
    layers: int = switch(4, "model.layers", elsewhere="follows from the number of stages")
    heads: int = switch(4, "model.heads", elsewhere="a size; on three tp ranks: test_odd_sizes")
    """Number of heads, each with four values."""
    batch: int = switch(2, "train.microbatch", elsewhere="follows from m")
    sequence: int = switch(8, "train.sequence_length", elsewhere=SIZE)
    steps: int = switch(STEPS, "train.steps", elsewhere="many: test_parity")
    resumed: bool = switch(False, layout=True, values=BINARY)
    """Whether the second step resumes from a checkpoint of the first."""

    @property
    def replicated(self) -> bool:
        """Whether some gradient is a sum over several processes."""
        tied = self.tied and self.pp > 1
        return self.copies > 1 or ((tied or self.replicas is not None) and not self.in_process)

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same weights: replicas of the model, and parts of a
        sequence."""
        return self.dp * self.cp

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp * (1 if self.in_process else self.pp)

    @property
    def of_experts(self) -> tuple[int, int]:
        return self.ep, self.etp

    @property
    def grid(self) -> Grid:
        """Grid of its processes."""
        pp = 1 if self.in_process else self.pp
        node = self.node if self.dispatch == "hierarchical" else None
        return Grid(pp, self.dp, self.cp, self.tp, *self.of_experts, node)

    @property
    def name(self) -> str:
        """Fields that differ from the defaults."""
        default = Case()
        return " ".join(
            f"{key}={value}" for key, value in vars(self).items() if value != getattr(default, key)
        )


SWITCHES: dict[str, Switch] = {each.name: each.metadata["switch"] for each in fields(Case)}
"""The :class:`Switch` of each field of a case, by name."""


def configure(case: Case) -> tuple[Config, Layout]:
    """Return the resolved configuration of a case, and its layout."""
    tree: dict[str, Any] = {"run": {"seed": 7}}
    for name, about in SWITCHES.items():
        if about.direct:
            *sections, key = about.key.split(".")
            value = getattr(case, name)
            if "options" in sections and value is None:
                continue  # sections without this option refuse null too
            section = functools.reduce(lambda at, name: at.setdefault(name, {}), sections, tree)
            section[key] = list(value) if isinstance(value, tuple) else value
    for name, keys in _sections(case).items():
        tree.setdefault(name, {}).update(keys)
    config = Config.model_validate(tree)
    config, resolved = resolve(config, case.world, case.vocab, measure=BY_UNITS)
    if case.codec != config.experts.wire_dtype:
        config, resolved = _coded(config, resolved, case.codec)
    if case.lengths is not None:
        assert len(case.lengths) == resolved.schedule.slices
        assert sum(case.lengths) == case.sequence
        resolved = replace(resolved, slice_lengths=case.lengths)
    return config, resolved


def _sections(case: Case) -> dict[str, dict[str, Any]]:
    """Return the settings that fields of a case determine without being a key's value."""
    codec = case.codec if case.dtype != "fp64" else "none"
    grouped = {"only": {"expert_gemm": "grouped"}} if case.grouped else {}
    options = {"trust_coefficient": 0.1} if case.rule == "lars" else {}
    slow = {"peak_tflops": SLOW} if case.placement in ("shadows", "migrating") else {}
    return {
        "model": {"hidden": 4 * case.heads, **MODELS[case.model], "moe": _moe(case)},
        "lora": _lora(case),
        "context": context_of(case),
        "experts": {"wire_dtype": codec, **_placement(case)},
        "pipeline": {
            "stage_layout": _uneven_layout(case),
            "transport": "in_process" if case.in_process else "process_group",
        },
        "activations": ACTIVATIONS[case.activations],
        "kernels": grouped,
        "optimizer": {
            "options": options,
            "lr": LR,
            "min_lr": LR / 10,
            "warmup_steps": 1,
            "offload_folder": tempfile.gettempdir(),
        },
        "plan": slow,
        "train": {"global_batch": case.batch * case.m * case.dp},
    }


def _uneven_layout(case: Case) -> str | None:
    """Return a stage layout with one layer per stage; the second stage has all others."""
    if not case.uneven or (stages := _stages(case)) == 1:
        return None
    counts = [1] * stages
    counts[1] += case.layers - stages
    return f"E {' | '.join(f'L*{n}' for n in counts)} H"


def _coded(config: Config, layout: Layout, codec: str) -> tuple[Config, Layout]:
    """Set the wire type, which a run of an fp64 model may not have. fp64 shows, beyond all other
    rounding, where and how rows are coded."""
    experts = config.experts.model_copy(update={"wire_dtype": codec})
    config = config.model_copy(update={"experts": experts})
    return config, replace(layout, model=model_spec_of(config, layout.device))


@functools.lru_cache(maxsize=64)
def settings(case: Case) -> Config:
    """Return the resolved configuration of a case, to be read only."""
    return configure(case)[0]


def context_of(case: Case) -> dict[str, Any]:
    if case.context == "ulysses":
        return {"ulysses": case.cp}
    return CONTEXTS[case.context] if case.cp > 1 else {}


def _moe(case: Case) -> dict[str, Any]:
    """Return the section model.moe, with as many numbers of experts as there are MoE layers."""
    section = MOE[case.moe] if case.moe else {}
    numbers = section.get("num_experts")
    if not isinstance(numbers, list):
        return section
    layers = filter(MoEConfig.model_validate(section).has_experts, range(case.layers))
    return {**section, "num_experts": numbers[: len(list(layers))]}


def _placement(case: Case) -> dict[str, Any]:
    section = PLACEMENTS[case.placement]
    if (
        section.get("rebalance") != "migrate" or case.ep == 1
    ):  # with one rank there are no other owners
        return section
    moe = MoEConfig.model_validate(_moe(case))
    experts = {n: moe.experts_of(n) for n in filter(moe.has_experts, range(case.layers))}
    return {**section, "rebalance_pool": str(pool_file(experts, case.ep))}


def _lora(case: Case) -> dict[str, Any]:
    if case.lora is None:
        return {}
    section = ADAPTED[case.lora]
    return {**section, "alpha": reference.ADAPTER_SCALE * section["rank"]}


def _stages(case: Case) -> int:
    if case.schedule == "two_group":
        return 2 * case.pp
    schedule = build(
        case.schedule,
        ranks=case.pp,
        microbatches=case.m,
        chunks=case.chunks,
        chimera_pairs=case.pairs,
        ranks_per_stage=case.replicas,
    )
    return schedule.placement.stages


@functools.lru_cache(maxsize=64)
def batch_of(case: Case, step: int) -> reference.Batch:
    """Return the global batch of one step, [samples, s] each, equal for every layout of a size."""
    config = settings(case)
    tokens, labels, mask = reference.random_batch(
        config.model,
        config.train.global_batch,
        case.sequence,
        seed=100 + step,
        masked=case.masked,
    )
    if case.documents:
        tokens[labels % 4 == 0] = END
    return tokens, labels, mask


class Rows:
    """The batches as a source of samples by global index."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.size = case.batch * case.m * case.dp

    def __call__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        step = indices[0] // self.size
        rows = [i - step * self.size for i in indices]
        tokens, labels, mask = batch_of(self.case, step)
        return tokens[rows], labels[rows], mask[rows].bool()


def validation_samples(case: Case) -> int:
    """Return one sample fewer than a step's batch: the last micro-batch is short."""
    return case.batch * case.m * case.dp - 1


def validation_rows(case: Case) -> Any:
    """Return a source that repeats step 0's batch: the step itself has to stop at the samples."""
    tokens, labels, mask = batch_of(case, 0)

    def rows(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        index = [i % len(tokens) for i in indices]
        return tokens[index], labels[index], mask[index].bool()

    return rows


PLAIN = Case()


def plain(case: Case) -> Case:
    """Return the case as the reference sees it: the same model and data, no layout."""
    without = {name: getattr(PLAIN, name) for name, about in SWITCHES.items() if about.layout}
    return replace(case, **without, m=case.m * case.dp)
