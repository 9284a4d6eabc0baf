"""A stage that is planned for a GPU: its kernels, by name, and the bytes that they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.assembly.kernels import select_kernels
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.ops.attention_choice import planned_backend
from megapipe.ops.documents import Documents
from megapipe.ops.live_storages import LiveStorages
from megapipe.ops.probe import planning
from megapipe.plan import trace
from megapipe.plan.cuda_kernels import WORKSPACES
from megapipe.plan.kernels import planned_kernels
from megapipe.plan.run import measure
from megapipe.plan.unit import Kernel, Operation, Unit

META = torch.device("meta")
BF16, FP32, UINT64 = 2, 4, 8
ROWS, LENGTH, HIDDEN, HEADS, DIM = 2, 96, 64, 4, 16
LAYERS = 2
"""Number of layers of a stage."""
VALUES = ROWS * LENGTH * HIDDEN
"""Number of values of hidden states."""
SCORES = ROWS * HEADS * LENGTH
"""Number of rows of scores."""

LLAMA = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "bias": False}
MIXTURE = {**LLAMA, "moe": {"num_experts": 4, "expert_ffn_hidden": 32, "top_k": 2}}
Keys = Mapping[str, Any]

FLASH, PACKED = "_scaled_dot_product_flash_attention", "_flash_attention_forward"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
FLEX = "_scaled_dot_product_fused_attention_overrideable"
MATH = "_safe_softmax"
ATTENTION = {FLASH, PACKED, EFFICIENT, CUDNN, FLEX, MATH}
RMS, BY_HAND = "_fused_rms_norm", {"linalg_vector_norm"}


def planned(model: Keys | None = None, **sections: Keys) -> tuple[Config, Layout]:
    """Resolve a model of four layers on two pipeline ranks."""
    sizes = {"layers": 4, "hidden": HIDDEN, "heads": HEADS, "dtype": "bf16", "vocab_size": 256}
    sections["model"] = {**sizes, **(model or {})}
    sections["train"] = {"sequence_length": LENGTH, "microbatch": ROWS, "global_batch": 8}
    sections["parallel"] = {"pp": 2, "dp": 1, **sections.get("parallel", {})}
    config = Config.model_validate({"plan": {"device": "H100"}, **sections})
    parallel = config.parallel
    world = parallel.pp * parallel.tp * parallel.cp
    return resolve(config, world, sections["model"]["vocab_size"])


def unit_of(model: Keys | None = None, stage: int = 0, **sections: Keys) -> Unit:
    config, layout = planned(model, **sections)
    assert layout.device == "cuda"
    (unit,) = measure(config, layout, stage)
    return unit


def names(unit: Unit, operation: Operation) -> set[str]:
    return {each.name for each in unit.operations[operation] if isinstance(each, Kernel)}


@pytest.mark.parametrize(
    ("expected", "model", "sections"),
    [
        ({FLASH, "native_layer_norm"}, {}, {}),
        ({FLASH, RMS}, LLAMA, {}),
        ({FLASH, RMS}, {**LLAMA, "kv_heads": 2, "qk_norm": True}, {}),
        ({FLASH, "native_dropout"}, {"dropout": 0.1}, {}),
        ({EFFICIENT}, {"dtype": "fp32"}, {}),
        ({MATH}, {**LLAMA, "dtype": "fp32", "kv_heads": 2}, {}),
        ({FLASH, "linalg_vector_norm"}, {**LLAMA, "zero_centered_norm": True}, {}),
        ({PACKED}, LLAMA, {"data": {"document_mask": True}}),
        ({EFFICIENT}, {"dtype": "fp32"}, {"data": {"document_mask": True}}),
        ({FLEX}, {"positions": "alibi"}, {}),
        ({FLEX}, {**LLAMA, "attention_softcap": 30.0}, {}),
        ({"exp_"}, {**LLAMA, "attention_softcap": 30.0}, {"kernels": {"compile": True}}),
        ({FLASH}, LLAMA, {"parallel": {"cp": 2}}),
        ({FLASH}, LLAMA, {"parallel": {"cp": 2}, "context": {"ulysses": 2}}),
        ({EFFICIENT}, {**LLAMA, "dtype": "fp32"}, {"parallel": {"cp": 2}}),
        ({CUDNN}, LLAMA, {"parallel": {"cp": 2}, "kernels": {"only": {"attention": "cudnn"}}}),
        ({EFFICIENT}, LLAMA, {"kernels": {"only": {"attention": "efficient"}}}),
        ({CUDNN}, LLAMA, {"kernels": {"only": {"attention": "cudnn"}}}),
        ({FLASH}, LLAMA, {"kernels": {"only": {"attention": "flash_attn", "norm": "apex"}}}),
        ({"_grouped_mm"}, MIXTURE, {}),
        ({"mm"}, MIXTURE, {"kernels": {"only": {"expert_gemm": "loop"}}}),
    ],
)
def test_a_run_takes_the_kernels_that_it_would_on_a_gpu(
    expected: set[str], model: Keys, sections: Mapping[str, Keys]
) -> None:
    found = names(unit_of(model, **sections), "F")
    assert expected <= found
    assert found & ATTENTION == expected & ATTENTION or not expected & ATTENTION
    assert found & BY_HAND == expected & BY_HAND


def test_weight_gradients_are_added_within_their_products() -> None:
    within = unit_of(LLAMA, 1)
    assert names(within, "W") == {"addmm"}
    assert names(unit_of({**LLAMA, "dtype": "fp32"}, 1), "W") == {"addmm_"}
    apart = unit_of(LLAMA, 1, kernels={"only": {"weight_grad": "torch"}})
    assert names(apart, "W") == {"mm", "add_"}
    assert apart.peaks["W"] > within.peaks["W"]


def test_one_function_chooses_for_a_run_and_for_a_plan() -> None:
    """What is refused for a run is refused here, with its words; what is chosen is planned."""
    config, layout = planned({**LLAMA, "dtype": "fp32"}, kernels={"only": {"attention": "varlen"}})
    with pytest.raises(ConfigError, match="attention=varlen: takes bf16 and fp16, not float32"):
        planned_kernels(config, layout)
    config, layout = planned(LLAMA, data={"document_mask": True})
    with planning():
        chosen = select_kernels(
            config, layout.model.kernel_needs, torch.device("cuda"), torch.bfloat16
        )
    found = planned_kernels(config, layout)
    assert found.banner() == chosen.banner()
    assert {choice.purpose: choice.name for choice in found.choices} == {
        "attention": "varlen",
        "norm": "torch",
        "weight_grad": "fused",
        "rotary": "inductor",
        "loss": "inductor",
        "swiglu": "inductor",
        "optimizer": "torch",
    }
    assert found.loss_chunk == 4096


def test_what_torch_takes_for_its_attention() -> None:
    every = ("flash", "efficient", "cudnn", "math")

    def found(dtype: torch.dtype, dim: int = 64, **of: bool) -> str:
        given = {"masked": False, "grouped": False, **of}
        return planned_backend(dtype, dim, every, **given)

    assert found(torch.bfloat16) == found(torch.float16, grouped=True) == "flash"
    assert found(torch.float32) == found(torch.bfloat16, masked=True) == "efficient"
    assert found(torch.bfloat16, 264) == "efficient"
    assert found(torch.float32, grouped=True) == found(torch.float64) == "math"
    assert found(torch.float32, 6) == "math"


def alive(out: Tensor, live: LiveStorages) -> list[int]:
    """Return the bytes of what lives with a result, ascending."""
    assert out.requires_grad
    return live.sizes


def heads() -> list[Tensor]:
    """Make q, k and v in one tensor, positions first."""
    qkv = torch.empty(
        LENGTH, ROWS, 3, HEADS, DIM, dtype=torch.bfloat16, device=META, requires_grad=True
    )
    return [x.permute(1, 2, 0, 3) for x in qkv.unbind(2)]


@pytest.mark.parametrize(
    ("name", "lse", "state"),
    [
        ("flash", FP32 * SCORES, [UINT64, 2 * UINT64]),
        ("cudnn", FP32 * SCORES, [UINT64, UINT64]),
        ("efficient", FP32 * SCORES, [UINT64, UINT64]),
    ],
)
def test_attention_keeps_its_output_an_lse_and_the_state_of_a_generator(
    name: str, lse: int, state: list[int]
) -> None:
    config, layout = planned(kernels={"only": {"attention": name}})
    attention, given = planned_kernels(config, layout).attention, heads()
    with LiveStorages(given) as live:
        out = attention(*given, 0.0, None)
    assert alive(out, live) == [*state, lse, BF16 * VALUES]


def test_documents_keep_copies_of_the_rows_that_lie_apart() -> None:
    config, layout = planned(data={"document_mask": True})
    attention, given = planned_kernels(config, layout).attention, heads()
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    documents = Documents(ids, META)
    ends = documents.runs(LENGTH)
    known = [*given, ends.cu_seqlens_q, ends.cu_seqlens_k]
    with LiveStorages(known) as live:
        out = attention(*given, 0.0, documents)
    copies = [BF16 * VALUES] * 3
    assert alive(out, live) == [UINT64, 2 * UINT64, FP32 * SCORES, BF16 * VALUES, *copies]


def test_a_norm_keeps_a_number_per_row() -> None:
    config, layout = planned(LLAMA)
    norm = planned_kernels(config, layout).norm
    x = torch.empty(LENGTH, ROWS, HIDDEN, dtype=torch.bfloat16, device=META, requires_grad=True)
    weight = torch.empty(HIDDEN, dtype=torch.bfloat16, device=META, requires_grad=True)
    with LiveStorages([x, weight]) as live:
        y = norm(x, weight, None, 1e-5, False, False)
        assert alive(y, live) == [FP32 * ROWS * LENGTH, BF16 * VALUES]
        grads = torch.autograd.grad(y, [x, weight], torch.empty_like(y))
    assert [grad.shape for grad in grads] == [x.shape, weight.shape]


def test_dropout_keeps_a_byte_for_each_value() -> None:
    """Twice a layer; attention, which drops its own, keeps nothing for it."""
    assert unit_of({"dropout": 0.1}, 1).held - unit_of({}, 1).held == LAYERS * 2 * VALUES


def test_swiglu_keeps_gate_and_up_alone() -> None:
    by_torch = unit_of(LLAMA, kernels={"only": {"swiglu": "torch", "rotary": "torch"}})
    by_inductor = unit_of(LLAMA)
    assert by_inductor.held == by_torch.held
    assert by_inductor.queued == by_torch.queued
    fewer = [len(unit.operations["F"]) for unit in (by_torch, by_inductor)]
    assert fewer[0] - fewer[1] == LAYERS * 3  # silu and product; two halves of a rotation


def test_logits_stay_in_the_models_type() -> None:
    """torch's operations make a copy in fp32."""
    model = {**LLAMA, "vocab_size": 8192}
    by_torch, by_inductor = (
        unit_of(model, 1, kernels={"only": {"loss": name}, "loss_chunk_tokens": 64}).peaks["I"]
        for name in ("torch", "inductor")
    )
    assert by_torch - by_inductor == pytest.approx(64 * 8192 * FP32, rel=0.01)


def test_flash_takes_sums_in_fp32_while_it_runs() -> None:
    """Computed by hand: queries in blocks of 128 rows and 32 columns, and a number for each row.
    Inputs come with positions first, so gradient and output are copied; of few key heads, gradients
    too."""
    q, k, v = heads()
    lse = torch.empty(ROWS, HEADS, LENGTH, device=META)
    of = WORKSPACES[torch.ops.aten._scaled_dot_product_flash_attention_backward.default]
    sums = FP32 * ROWS * HEADS * 128 * (32 + 1)
    assert of(q, q, k, v, q, lse) == sums + 2 * BF16 * VALUES
    there = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert of(there, q, k, v, there, lse) == sums
    assert of(there, q, k[:, :1], v[:, :1], there, lse) == sums + 2 * BF16 * VALUES


def test_rows_of_documents_have_room_for_a_block_more_each() -> None:
    of = WORKSPACES[torch.ops.aten._flash_attention_backward.default]
    rows, documents = 300, 5
    q = torch.empty(rows, HEADS, DIM, dtype=torch.bfloat16, device=META)
    lse = torch.empty(HEADS, rows, device=META)
    ends = torch.empty(documents + 1, dtype=torch.int32, device=META)
    sums = FP32 * HEADS * (rows + 128 * documents) * (32 + 1)
    assert of(q, q, q, q, q, lse, ends, ends) == sums
    of_keys = 2 * BF16 * rows * HEADS * DIM
    assert of(q, q, q[:, :1], q[:, :1], q, lse, ends, ends) == sums + of_keys


def test_efficient_sums_narrow_gradients_alone() -> None:
    of = WORKSPACES[torch.ops.aten._scaled_dot_product_efficient_attention_backward.default]
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads())
    assert of(q, q, k, v, None, q) == FP32 * ROWS * HEADS * (LENGTH + 128 * 64)
    assert of(q.float(), q.float(), k.float(), v.float(), None, q) == FP32 * SCORES


def test_bytes_within_a_kernel_are_in_the_peak_of_its_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = unit_of()
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    monkeypatch.setattr(trace, "WORKSPACES", {"cuda": {flash: lambda *_, **__: 1 << 40}})
    after = unit_of()
    assert after.peaks["I"] > 1 << 40
    assert after.peaks["B"] > 1 << 40
    for same in ("F", "W"):
        assert after.peaks[same] == before.peaks[same]  # type: ignore[index]
    assert (after.held, after.queued) == (before.held, before.queued)


def test_documents_have_the_flops_of_sequences_where_they_are_one_each() -> None:
    whole, packed = unit_of(LLAMA), unit_of(LLAMA, data={"document_mask": True})
    for operation in ("F", "I"):
        assert packed.flops(operation) == whole.flops(operation)  # type: ignore[arg-type]


def test_blocks_that_a_run_compiles_are_planned_as_they_are() -> None:
    plain, compiled = unit_of(LLAMA), unit_of(LLAMA, kernels={"compile": True})
    assert compiled.compiled
    assert not plain.compiled
    assert compiled.held == plain.held
