"""The cases of the parity matrix: one layout, and how it trains one small model, each."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megapipe.config import Config
from megapipe.distributed.mesh import Grid
from megapipe.layout.family import family_of
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.model.gpt.moe_config import MoEConfig
from megapipe.schedule.generators import build
from tests.parity import reference
from tests.parity.drawn_owners import pool_file
from tests.parity.named_settings import ACTIVATIONS, ADAPTED, CONTEXTS, MODELS, MOE, PLACEMENTS

STEPS = 2
"""Each is checked by itself, from what the ranks had before it: the first from zero states, the
second from states that are not. More are taken where something comes in turns."""
LR = 1e-3
"""Peak learning rate. Adam moves a weight whose true gradient is zero (a key bias's) by rounding
errors of about 1e-17 x lr / eps; at this rate that stays under the tolerance."""
SLOW = 1e-9
"""TFLOP/s of a device on which copies of experts, or their moves, take less time than rows."""
END = 5
"""The token that ends a document."""


@dataclass(frozen=True)
class Case:
    """One layout of one small model. Defaults are the plainest."""

    dp: int = 1
    cp: int = 1
    context: str = "ring"
    """Of CONTEXTS, where positions are split."""
    tp: int = 1
    pp: int = 1
    chunks: int | None = None
    m: int = 2
    schedule: str = "1f1b"
    group: int | None = None
    slices: int | None = None
    lengths: tuple[int, ...] | None = None
    """Of the slices, whatever the layout has chosen."""
    slice_overhead: float | None = None
    slice_attention: float = 1.0
    pairs: int | None = None
    replicas: tuple[int, ...] | None = None
    advance: int | None = None
    weights: str = "synchronous"
    """Which ones operations read; without a flush `tests.parity.stale` is the reference."""
    horizon: str = "update"
    """Of the weights "predict"."""
    correction: float | None = None
    """Of the weights "correct"."""
    lr_anneal_steps: int | None = None
    synchronous_steps: int | None = None
    swap: bool = False
    """Run gpipe instead, on the schedule's placement, replicas, slices and parts."""
    in_process: bool = False
    scatter: str = "off"
    sequence_parallel: bool = False
    zero: int = 1
    shard_size: int | None = None
    prefetch: int = 1
    reduce_dtype: str | None = None
    reduce_chunk_mib: float | None = None
    rule: str = "adamw"
    look_ahead: int | str = 0
    state_dtype: str = "fp32"
    master: str = "fp32"
    rounding: str = "stochastic"
    offload: str = "none"
    post_validation: bool = False
    activations: str = "keep"
    loss_chunk: int | None = None
    compile: bool = False
    overlap: bool = True
    moe: str | None = None
    """Of MOE: layers with experts."""
    ep: int = 1
    etp: int = 1
    grouped: bool = False
    """One kernel for the products of all experts."""
    dispatch: str = "all_to_all"
    node: int | None = None
    """Ranks of a node, where dispatch is hierarchical, or a topology has nodes."""
    expert_chunks: int = 1
    pad: bool = False
    """Experts have room for all rows that there can be."""
    codec: str = "none"
    """Of rows on their way to experts."""
    topology: tuple[float, ...] | None = None
    """Bandwidths by which the balance term goes."""
    placement: str = "static"
    """Which ranks have which experts: of PLACEMENTS."""
    lora: str | None = None
    """Adapters are trained, beside the layers of that name in ADAPTED."""
    model: str = "gpt2"
    tied: bool = True
    uneven: bool = False
    vocab: int = 300
    kv_heads: int | None = None
    masked: float = 0.0
    documents: bool = False
    """Attention ends at documents, of about four tokens."""
    dtype: str = "fp64"
    loss_scale: float | None = None
    """fp16: one that stays as it is."""
    dropout: float = 0.0
    clip: float | None = 0.05
    clip_scope: str = "global"
    debug: bool = False
    layers: int = 4
    heads: int = 4
    """Each of four values."""
    batch: int = 2
    sequence: int = 8
    steps: int = STEPS

    @property
    def replicated(self) -> bool:
        """Whether some gradient is the sum of what several processes have."""
        tied = self.tied and self.pp > 1
        return self.dp * self.cp > 1 or (
            (tied or self.replicas is not None) and not self.in_process
        )

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp * (1 if self.in_process else self.pp)

    @property
    def of_experts(self) -> tuple[int, int]:
        return self.ep, self.etp

    @property
    def grid(self) -> Grid:
        """Of its processes."""
        pp = 1 if self.in_process else self.pp
        node = self.node if self.dispatch == "hierarchical" else None
        return Grid(pp, self.dp, self.cp, self.tp, *self.of_experts, node)

    @property
    def name(self) -> str:
        """The fields that differ from the defaults."""
        default = Case()
        return " ".join(
            f"{key}={value}" for key, value in vars(self).items() if value != getattr(default, key)
        )


def configure(case: Case) -> tuple[Config, Layout]:
    """The resolved configuration of a case."""
    layout: str | None = None
    if case.uneven and (stages := _stages(case)) > 1:
        # everything that is left on the second stage, one layer on the others
        counts = [1] * stages
        counts[1] += case.layers - stages
        layout = " | ".join(f"L*{n}" for n in counts)
        layout = f"E {layout} H"
    config = Config.model_validate(
        {
            "run": {"seed": 7},
            "model": {
                "layers": case.layers,
                "hidden": 4 * case.heads,
                "heads": case.heads,
                "kv_heads": case.kv_heads,
                "vocab_size": case.vocab,
                "tied_embeddings": case.tied,
                "dropout": case.dropout,
                "dtype": case.dtype,
                **MODELS[case.model],
                "moe": _moe(case),
            },
            "lora": _lora(case),
            "parallel": {
                "dp": case.dp,
                "cp": case.cp,
                "tp": case.tp,
                "pp": case.pp,
                "ep": case.ep,
                "etp": case.etp,
                "sequence_parallel": case.sequence_parallel,
            },
            "context": context_of(case),
            "experts": {
                "dispatch": case.dispatch,
                "node": case.node,
                "chunks": case.expert_chunks,
                "pad": case.pad,
                "codec": case.codec if case.dtype != "fp64" else "none",
                "topology": case.topology and list(case.topology),
                **_placement(case),
            },
            "pipeline": {
                "schedule": case.schedule,
                "chunks": case.chunks,
                "group": case.group,
                "slices": case.slices,
                "slice_overhead": case.slice_overhead,
                "slice_attention": case.slice_attention,
                "pairs": case.pairs,
                "replicas": case.replicas and list(case.replicas),
                "advance": case.advance,
                "weights": case.weights,
                "horizon": case.horizon,
                "correction": case.correction,
                "lr_anneal_steps": case.lr_anneal_steps,
                "synchronous_steps": case.synchronous_steps,
                "layout": layout,
                "channels": "in_process" if case.in_process else "process_group",
                "debug": case.debug,
                "scatter_gather": case.scatter,
            },
            "activations": ACTIVATIONS[case.activations],
            "kernels": {
                "loss_chunk": case.loss_chunk,
                "compile": case.compile,
                "overlap": case.overlap,
                "experts": "grouped" if case.grouped else "auto",
            },
            "data": {"document_mask": case.documents},
            "optimizer": {
                "rule": case.rule,
                "look_ahead": case.look_ahead,
                "trust_coefficient": 0.1,
                "lr": LR,
                "min_lr": LR / 10,
                "warmup_steps": 1,
                "clip": case.clip,
                "clip_scope": case.clip_scope,
                "zero": case.zero,
                "shard_size": case.shard_size,
                "prefetch": case.prefetch,
                "reduce_dtype": case.reduce_dtype,
                "reduce_chunk_mib": case.reduce_chunk_mib,
                "state_dtype": case.state_dtype,
                "master": case.master,
                "rounding": case.rounding,
                "loss_scale": case.loss_scale,
                "offload": case.offload,
                "offload_folder": tempfile.gettempdir(),
                "post_validation": case.post_validation,
            },
            "log": {"peak_tflops": SLOW} if case.placement in ("shadows", "migrating") else {},
            "train": {
                "steps": case.steps,
                "sequence_length": case.sequence,
                "global_batch": case.batch * case.m * case.dp,
                "microbatch": case.batch,
            },
        }
    )
    config, resolved = resolve(config, case.world, case.vocab)
    if case.codec != config.experts.codec:
        config, resolved = _coded(config, resolved, case.codec)
    if case.lengths is not None:
        assert len(case.lengths) == resolved.schedule.slices
        assert sum(case.lengths) == case.sequence
        resolved = replace(resolved, slice_lengths=case.lengths)
    return config, resolved


def _coded(config: Config, layout: Layout, codec: str) -> tuple[Config, Layout]:
    """With a codec, which a run of an fp64 model may not have: in fp64 it shows, beyond all other
    roundings, that rows are coded where they should be, and how."""
    experts = config.experts.model_copy(update={"codec": codec})
    config = config.model_copy(update={"experts": experts})
    return config, replace(layout, model=family_of(config, layout.device))


@functools.lru_cache(maxsize=64)
def settings(case: Case) -> Config:
    """The resolved configuration of a case, to be read only."""
    return configure(case)[0]


def context_of(case: Case) -> dict[str, Any]:
    if case.context == "ulysses":
        return {"ulysses": case.cp}
    return CONTEXTS[case.context] if case.cp > 1 else {}


def _moe(case: Case) -> dict[str, Any]:
    """With as many numbers of experts as there are layers with some."""
    section = MOE[case.moe] if case.moe else {}
    numbers = section.get("experts")
    if not isinstance(numbers, list):
        return section
    layers = filter(MoEConfig.model_validate(section).has_experts, range(case.layers))
    return {**section, "experts": numbers[: len(list(layers))]}


def _placement(case: Case) -> dict[str, Any]:
    section = PLACEMENTS[case.placement]
    if section.get("policy") != "migrate":
        return section
    moe = MoEConfig.model_validate(_moe(case))
    experts = {n: moe.experts_of(n) for n in filter(moe.has_experts, range(case.layers))}
    return {**section, "pool": str(pool_file(experts, case.ep))}


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
        pairs=case.pairs,
        replicas=case.replicas,
    )
    return schedule.placement.stages


@functools.lru_cache(maxsize=64)
def batch_of(case: Case, step: int) -> reference.Batch:
    """The global batch of one step, [samples, s] each, the same for every layout of a size."""
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
    """The batches as a source of rows by global sample index."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.size = case.batch * case.m * case.dp

    def __call__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        step = indices[0] // self.size
        rows = [i - step * self.size for i in indices]
        tokens, labels, mask = batch_of(self.case, step)
        return tokens[rows], labels[rows], mask[rows].bool()


def validation_samples(case: Case) -> int:
    """One sample fewer than a step's batch: the last micro-batch is short."""
    return case.batch * case.m * case.dp - 1


def validation_rows(case: Case) -> Any:
    """Rows of step 0's batch, over and over: the step itself has to stop at the samples."""
    tokens, labels, mask = batch_of(case, 0)

    def rows(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        index = [i % len(tokens) for i in indices]
        return tokens[index], labels[index], mask[index].bool()

    return rows


def plain(case: Case) -> Case:
    """The case as the reference sees it: the same model and data, no layout."""
    return replace(
        case,
        dp=1,
        cp=1,
        context="ring",
        tp=1,
        pp=1,
        ep=1,
        etp=1,
        dispatch="all_to_all",
        node=None,
        expert_chunks=1,
        pad=False,
        codec="none",
        topology=None,
        placement="static",
        chunks=None,
        m=case.m * case.dp,
        schedule="1f1b",
        group=None,
        slices=None,
        lengths=None,
        slice_overhead=None,
        slice_attention=1.0,
        pairs=None,
        replicas=None,
        advance=None,
        in_process=False,
        scatter="off",
        sequence_parallel=False,
        zero=1,
        shard_size=None,
        prefetch=1,
        offload="none",
        reduce_dtype=None,
        reduce_chunk_mib=None,
        post_validation=False,
        uneven=False,
        debug=False,
        activations="keep",
        compile=False,
    )
