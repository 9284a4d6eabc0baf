"""Points as configurations: what a row says, and what is assumed where its source says nothing.

:func:`configuration` joins both. Every assumption about a source has one entry in
:data:`ASSUMPTIONS`, with its reason. An assumption was made from what the source says about its
machines and program, never from the difference between predicted and measured times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megapipe.layout.devices import Device
from published.points import Point

Settings = Mapping[str, object]
"""Values of configuration keys; None removes one that the row says."""

SCHEDULES = {
    "": "1f1b",
    "none": "1f1b",
    "1f1b": "1f1b",
    "1f1b (deepspeed)": "1f1b",
    "interleaved 1f1b": "interleaved_1f1b",
    "interleaved 1f1b (pp>1)": "interleaved_1f1b",
    "afab": "gpipe",
    "gpipe": "gpipe",
    "zb-1p": "zb_1p",
    "zb-2p": "zb_2p",
    "zb-h1": "zb_h1",
    "zb-h2": "zb_h2",
    "zb-v": "zb_v",
}
"""Registered schedules by the names of sources."""
RECOMPUTED = {"norm": "norm", "act": "mlp_activation", "moe": "experts", "attention": "attention"}
"""Entries of ``activations.modules`` by the names of sources."""
_QWEN3 = {
    "model.kv_heads": 4,
    "model.head_dim": 128,
    "model.vocab_size": 151936,
    "model.qk_norm": True,
    "model.moe.num_experts": 128,
    "model.moe.top_k": 8,
}
SIZES: Mapping[str, Settings] = {
    "qwen3-235b": {
        **_QWEN3,
        "model.layers": 94,
        "model.hidden": 4096,
        "model.heads": 64,
        "model.moe.expert_ffn_hidden": 1536,
    },
    "qwen3-30b": {
        **_QWEN3,
        "model.layers": 48,
        "model.hidden": 2048,
        "model.heads": 32,
        "model.moe.expert_ffn_hidden": 768,
    },
    "3b-of-experts": {
        "model.moe.num_experts": 32,
        "model.moe.top_k": 4,
        "model.moe.expert_ffn_hidden": 1152,
    },
}
"""Sizes that files of points have no columns for, by the beginning of a model's name: Qwen3's are
from its report (2505.09388), the last model is that of benchmarks/gpu_experts.py."""
LLAMA: Settings = {
    "model.norm": "rmsnorm",
    "model.positions": "rotary",
    "model.activation": "swiglu",
    "model.bias": False,
    "model.tied_embeddings": False,
}


@dataclass(frozen=True)
class Assumption:
    """Values of keys that a source does not say, or says in other words."""

    what: str
    why: str
    applies: Callable[[Point], bool]
    settings: Callable[[Point], Settings] = lambda point: {}
    for_memory: Callable[[Point], Settings] = lambda point: {}
    """Values of keys with which memory alone is planned."""


def _sizes(point: Point) -> Settings | None:
    name = re.sub("[_ ]", "-", point.model.lower())
    return next((sizes for start, sizes in SIZES.items() if name.startswith(start)), None)


def layers_of(point: Point) -> int:
    """Return the number of layers; 0 if nobody says it."""
    found = (_sizes(point) or {}).get("model.layers", point.layers)
    return found if isinstance(found, int) else 0


def _is_gpt(point: Point) -> bool:
    return point.model.startswith(("GPT", "MT-NLG", "BLOOM"))


def _is_old_megatron(point: Point) -> bool:
    return _is_gpt(point) and point.device == "A100"


def is_bloom(point: Point) -> bool:
    """Whether a row is of BLOOM's search for a layout."""
    return "bigscience" in point.source


def _is_before_2022(point: Point) -> bool:
    return any(name in point.source for name in ("bigscience", "PTD-P", "MT-NLG"))


def keeps_short_gradients(point: Point) -> bool:
    """Whether a source keeps gradients in 16 bits, where megapipe has 32."""
    return "DeepSpeed" in point.schedule and point.precision == "fp16"


def _is_torchtitan(point: Point) -> bool:
    return "torchtitan" in point.source


def _is_fsdp(point: Point) -> bool:
    return "FSDP" in point.sharding


def compiles(point: Point) -> bool:
    """Whether blocks were compiled."""
    return re.search(r"(?<!not )(?<!no )\bcompiled?\b", point.notes) is not None


def _is_interleaved(point: Point) -> bool:
    return point.schedule.lower().startswith("interleaved")


def _every_layer(point: Point, policies: Sequence[str]) -> list[str]:
    return [policies[i % len(policies)] for i in range(layers_of(point))]


ASSUMPTIONS = (
    Assumption(
        "fp16 is planned as bf16",
        "kernels of both types take the same time and bytes",
        lambda point: point.precision == "fp16",
    ),
    Assumption(
        "GPT, MT-NLG and BLOOM are GPT-2 with other sizes; all other models are Llamas",
        "their papers and reports",
        lambda point: True,
        lambda point: {} if _is_gpt(point) else LLAMA,
    ),
    Assumption(
        "GPT on A100: Megatron-LM before flash attention, dropout 0.1, loss of whole fp32 logits",
        "all these runs are of 2021 to 2023; 0.1 is Megatron-LM's default",
        _is_old_megatron,
        lambda point: {
            "plan.system": "megatron-2021",
            "model.dropout": 0.1,
            "kernels.loss_chunk_tokens": 0,
            "kernels.only.loss": "torch",
        },
    ),
    Assumption(
        "GPT on A100: gradients are reduced after the last backward",
        "Megatron-LM overlaps reductions since 2023",
        _is_old_megatron,
        lambda point: {"optimizer.bucket_mib": "null"},
    ),
    Assumption(
        "BLOOM, PTD-P, MT-NLG: no compute beside tensor-parallel collectives",
        "Megatron-LM's asynchronous all-reduce came at the end of 2021; BLOOM's launches block",
        lambda point: point.tp > 1 and _is_before_2022(point),
        lambda point: {"kernels.tp_comm_overlap": False},
    ),
    Assumption(
        "DeepSpeed with fp16: gradients are kept and sent in 16 bits",
        "its ZeRO-1 converts the own shard of gradients alone",
        keeps_short_gradients,
        lambda point: {"optimizer.reduce_dtype": "bf16"},
    ),
    Assumption(
        "tp has sequence parallelism, except GPT on A100 unless the row says so",
        "Megatron-LM has it since 2022, and switches it on in its recipes",
        lambda point: point.tp > 1,
        lambda point: {
            "parallel.sequence_parallel": not _is_old_megatron(point)
            or "sequence parallel" in point.recompute
        },
    ),
    Assumption(
        "sizes of a mixture of experts",
        "Qwen3's report (2505.09388), benchmarks/ladder/sizes.py",
        lambda point: _sizes(point) is not None,
        lambda point: _sizes(point) or {},
    ),
    Assumption(
        "GPT-2's vocabulary of 50,257 if none is given",
        "Megatron-LM's default tokenizer",
        lambda point: point.vocab is None and _sizes(point) is None,
        lambda point: {"model.vocab_size": 50257},
    ),
    Assumption(
        "64 heads if none are given",
        "three of these BLOOM rows are printed twice in their source, once with 64 heads",
        lambda point: point.heads is None and _sizes(point) is None,
        lambda point: {"model.heads": 64},
    ),
    Assumption(
        "micro-batch 1 if none is given",
        "the source does not say; Megatron-LM's largest models have 1",
        lambda point: point.microbatch is None,
        lambda point: {"train.microbatch": 1},
    ),
    Assumption(
        "interleaved 1F1B without a number of chunks is planned as 1F1B",
        "the source does not say how many chunks",
        lambda point: _is_interleaved(point) and point.stages > 1 and point.chunks is None,
    ),
    Assumption(
        "embedding and head count as a layer each in the cut if the row says so, or if layers can "
        "only be cut evenly with them",
        "Megatron-LM refuses uneven cuts otherwise",
        lambda point: point.stages > 1 and _ends(point) > 0,
    ),
    Assumption(
        "layers that do not divide: the first stages have one more",
        "DeepSpeed fills stages from the first",
        lambda point: point.stages > 1 and (layers_of(point) + 2 * _ends(point)) % point.stages > 0,
    ),
    Assumption(
        "FSDP gathers one layer at a time",
        "megapipe gathers a stage, so each layer is a stage (docs/from_deepspeed.md)",
        _is_fsdp,
        lambda point: {
            "optimizer.zero": 3,
            **(
                {
                    "pipeline.schedule": "interleaved_1f1b",
                    "pipeline.chunks": layers_of(point),
                    "pipeline.stage_layout": [1] * layers_of(point),
                }
                if point.pp == 1
                else {}
            ),
        },
    ),
    Assumption(
        "torchtitan's selective recomputation: 3 of 8 layers are recomputed",
        "it recomputes every second product: 4.75 of 13 hidden^2 in a layer of Llama 3 8B",
        lambda point: _is_torchtitan(point) and point.recompute == "selective",
        lambda point: {
            "activations.policy": _every_layer(
                point, ("full", "keep", "keep", "full", "keep", "keep", "full", "keep")
            ),
            "activations.modules": None,
        },
    ),
    Assumption(
        "zero-bubble schedules validate after the update, without ZeRO and without a snapshot",
        "the rows' notes; their authors roll back in place",
        lambda point: "post-validation" in point.notes and point.schedule.startswith("ZB"),
        lambda point: {"optimizer.post_validation": True, "optimizer.zero": 0},
        for_memory=lambda point: {"optimizer.post_validation": False},
    ),
    Assumption(
        "compiled blocks if the row says so",
        "the rows' notes",
        compiles,
        lambda point: {"kernels.compile": True},
    ),
    Assumption(
        "DeepEP: dispatch in two hops if experts are on several nodes",
        "DeepEP sends between nodes first, then within them",
        lambda point: "DeepEP" in point.notes and point.ep > gpus_per_node(point),
        lambda point: {"experts.dispatch": "hierarchical", "experts.ranks_per_node": 8},
    ),
    Assumption(
        "8 GPUs to a node; 64 of GB200 and GB300",
        "DGX and HGX; NVL72 racks, of which jobs take 64",
        lambda point: True,
        lambda point: {"parallel.ranks_per_node": gpus_per_node(point)},
    ),
    Assumption(
        "network of a GPU: 25 GB/s for A100, 50 GB/s for later ones",
        "200 and 400 Gbit/s, as in DGX A100 and DGX H100",
        lambda point: not is_bloom(point),
        lambda point: {"plan.inter_node_gb_s": 25 if point.device == "A100" else 50},
    ),
    Assumption(
        "network of BLOOM's GPUs: 6.25 GB/s",
        "4 Omni-Path links of 12.5 GB/s for 8 GPUs",
        is_bloom,
        lambda point: {"plan.inter_node_gb_s": 6.25},
    ),
    Assumption(
        "BLOOM's kernels wait for the host",
        "CUDA_LAUNCH_BLOCKING=1 in its slurm files; the time per kernel is derived from two rows, "
        "which no figure contains",
        is_bloom,
    ),
    Assumption(
        "H100 of 500 W: large GEMMs reach 66% of the peak, memory 2.2 TB/s",
        "assumed before rows were compared: less power than 700 W, HBM2e",
        lambda point: "500 W" in point.gpu,
    ),
)
"""What is assumed, in the order in which it takes effect; later entries override earlier ones."""


def configuration(point: Point, *, for_memory: bool = False) -> dict[str, object]:
    """Return the configuration of a point as values of keys. `for_memory`: that with which its
    memory is planned."""
    settings = dict(_said(point))
    for assumption in ASSUMPTIONS:
        if assumption.applies(point):
            settings.update(assumption.settings(point))
            if for_memory:
                settings.update(assumption.for_memory(point))
    return {key: value for key, value in settings.items() if value is not None}


def words(settings: Settings) -> list[str]:
    """Write settings as on a command line."""
    return [f"{key}={_text(value)}" for key, value in settings.items()]


def _text(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def why_not_priced(point: Point) -> str | None:
    """Say why the planner cannot price a point; None if it can."""
    if point.precision.startswith("fp8"):
        return "fp8 recipe"
    if point.model.lower().startswith("deepseek"):
        return "latent attention (MLA)"
    if point.schedule.lower() not in SCHEDULES:
        return f"schedule: {point.schedule}"
    if (point.layers is None or point.hidden is None) and _sizes(point) is None:
        return "sizes of the model not given"
    if point.ran and point.step_s is None and point.memory is None:
        return "neither step time nor memory given"
    return None


def assumed_device(point: Point, device: Device, launch_us: float) -> Device:
    """Return a point's device. `launch_us`: microseconds that a kernel of a BLOOM row waits."""
    reaches = device.architecture
    if is_bloom(point):
        return replace(device, architecture=replace(reaches, kernel_us=launch_us))
    if "500 W" in point.gpu:
        return replace(device, tb_s=2.2, architecture=replace(reaches, gemm=0.66))
    return device


def gpus_per_node(point: Point) -> int:
    """Return the number of GPUs to a node."""
    return 64 if point.device in ("GB200", "GB300") else 8


def _said(point: Point) -> Iterator[tuple[str, object]]:
    """Yield the values of keys that a row says."""
    for key, value in (
        ("model.layers", point.layers),
        ("model.hidden", point.hidden),
        ("model.heads", point.heads),
        ("model.kv_heads", point.kv_heads),
        ("model.ffn_hidden", point.ffn),
        ("model.vocab_size", point.vocab),
        ("train.microbatch", point.microbatch),
    ):
        if value is not None:
            yield key, value
    yield "model.dtype", "bf16"
    yield "parallel.device", "cuda"
    yield "plan.device", point.gpu
    yield "parallel.tp", point.tp
    yield "parallel.pp", point.pp
    yield "parallel.cp", point.cp
    yield "parallel.dp", point.dp
    if point.ep > 1:
        yield "parallel.ep", point.ep
    yield "train.sequence_length", point.sequence
    yield "train.global_batch", point.global_batch
    yield "optimizer.zero", 1 if point.sharding == "ZeRO-1" else 0
    yield from _pipeline(point)
    yield from _recomputed(point)


def _pipeline(point: Point) -> Iterator[tuple[str, object]]:
    chunks = point.chunks or 1
    schedule = SCHEDULES[point.schedule.lower()]
    if schedule in ("1f1b", "interleaved_1f1b"):
        schedule = "interleaved_1f1b" if point.pp > 1 and chunks > 1 else "1f1b"
    yield "pipeline.schedule", schedule
    if schedule == "interleaved_1f1b":
        yield "pipeline.chunks", chunks
    if point.stages > 1:
        yield "pipeline.stage_layout", _cut(point)


def _ends(point: Point) -> int:
    """Return the layers for which the embedding counts in the cut, and the head likewise."""
    layers = layers_of(point)
    said = "one layer less" in point.notes or "a layer each" in point.notes
    only_so = layers % point.stages > 0 and (layers + 2) % point.stages == 0
    return int(said or only_so)


def _cut(point: Point) -> list[int]:
    """Return the number of layers of each stage."""
    ends = _ends(point)
    each, more = divmod(layers_of(point) + 2 * ends, point.stages)
    cut = [each + (i < more) for i in range(point.stages)]
    cut[0] -= ends
    cut[-1] -= ends
    return cut


def _recomputed(point: Point) -> Iterator[tuple[str, object]]:
    named = re.split(r"[ ,()+]+", point.recompute)
    if named[0] == "full":
        yield "activations.policy", "full"
    elif named[0] == "selective":
        yield "activations.policy", "selective"
        yield "activations.modules", ["attention"]
    elif modules := [RECOMPUTED[name] for name in named if name in RECOMPUTED]:
        yield "activations.policy", "selective"
        yield "activations.modules", modules
