"""Kernels of many blocks at once: flash-attn's interface, and how one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.ops import tile_candidates
from megapipe.ops.attention_choice import AttentionShape
from megapipe.ops.documents import VarlenLengths, varlen_lengths
from megapipe.ops.packed_tile_kernels import OneByOne, PackedFlashAttn
from megapipe.ops.probe import Candidate, Mismatch, choose_kernel
from megapipe.ops.scores import ScoreModifiers
from megapipe.ops.tile_attention import CpuFlash, MathTile
from megapipe.ops.tile_candidates import check_packs, packed_candidates
from megapipe.ops.tile_kernels import Cudnn, Efficient, Flash, FlashAttnTile

CPU = torch.device("cpu")
PLAIN = OneByOne(MathTile())


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
) -> tuple[Tensor, Tensor, None]:
    """Stand in for flash-attn's, with the arguments of 2.8 in use; the LSE is [heads, rows]."""
    assert return_attn_probs
    assert not dropout_p
    runs = checked(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return *PLAIN.forward(q, k, v, runs, causal, softmax_scale), None


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Stand in for flash-attn's, which writes into the gradients."""
    assert (window_size_left, window_size_right) == (-1, -1)
    assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
    assert softmax_lse.is_contiguous()
    assert softmax_lse.shape == (q.shape[1], len(q))
    runs = checked(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    found = PLAIN.backward(dout, q, k, v, out, softmax_lse, runs, causal, softmax_scale)
    for total, part in zip((dq, dk, dv), found, strict=True):
        total.copy_(part)
    return softmax_lse


def checked(q_ends: Tensor, k_ends: Tensor, most_q: int, most_k: int) -> VarlenLengths:
    assert q_ends.dtype == k_ends.dtype == torch.int32
    assert most_q == max(2, q_ends.diff().max()), "one way for all lengths"
    assert most_k == k_ends.diff().max()
    return VarlenLengths(q_ends, k_ends, most_q, most_k)


def package(**others: Callable[..., Any]) -> SimpleNamespace:
    functions = flash_attn_varlen_func, _flash_attn_varlen_backward
    return SimpleNamespace(**{of.__name__: of for of in functions} | others)


def given(groups: int = 2, scale: float | None = None) -> AttentionShape:
    return AttentionShape(
        CPU, torch.bfloat16, 4, groups, 16, 64, scores=ScoreModifiers(scale=scale)
    )


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_flash_attn(groups: int, scale: float | None) -> None:
    check_packs(given(groups, scale), PackedFlashAttn(package()))


def an_lse_by_rows(*args: Any, **options: Any) -> Any:
    out, lse, _ = flash_attn_varlen_func(*args, **options)
    return out, lse.T.contiguous(), None


def rows_of_other_blocks(*args: Any, **options: Any) -> Any:
    q, k, v, q_ends, k_ends, most_q, most_k = args
    return flash_attn_varlen_func(q, k, v.flip(0), q_ends, k_ends, most_q, most_k, **options)


def the_lse_of_the_block(*args: Any, **options: Any) -> Any:
    """Run the backward with the LSE of the block in place of the one over all keys."""
    dout, q, k, v, out, _, *others = args
    runs = VarlenLengths(*others[3:7])
    _, own = PLAIN.forward(q, k, v, runs, options["causal"], options["softmax_scale"])
    return _flash_attn_varlen_backward(dout, q, k, v, out, own, *others, **options)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"flash_attn_varlen_func": rows_of_other_blocks}, "result 0 of its self-check"),
        ({"_flash_attn_varlen_backward": the_lse_of_the_block}, "result 2 of its self-check"),
    ],
    ids=lambda x: "",
)
def test_what_is_wrong_is_found(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(Mismatch, match=why):
        check_packs(given(), PackedFlashAttn(package(**wrong)))


def test_the_choice_goes_with_the_kernel_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def choice(blocks: Any) -> tuple[str, Any, list[str]]:
        found = choose_kernel("attention", "auto", packed_candidates(given(), blocks))
        return found.name, found.kernel, list(found.warnings)

    for blocks in (CpuFlash(), MathTile(), Cudnn(), Efficient()):
        assert choice(blocks) == ("one by one", None, [])
    name, kernel, _ = choice(FlashAttnTile(package()))
    assert name == "flash_attn varlen"
    assert isinstance(kernel, PackedFlashAttn)
    wrong = package(flash_attn_varlen_func=an_lse_by_rows)
    name, kernel, (warning,) = choice(FlashAttnTile(wrong))
    assert (name, kernel) == ("one by one", None)
    assert warning.startswith("kernels.only.attention: flash_attn varlen is not used: ")
    # torch's is there on a GPU only
    name, kernel, (warning,) = choice(Flash())
    assert (name, kernel) == ("one by one", None)
    monkeypatch.setattr(tile_candidates, "PackedFlash", partial(PackedFlashAttn, package()))
    name, _, warnings = choice(Flash())
    assert (name, warnings) == ("varlen", [])
    assert isinstance(packed_candidates(given(), Flash())[0], Candidate)


def test_runs() -> None:
    runs = varlen_lengths([(2, 3), (1, 1), (4, 2)], CPU)
    assert runs.cu_seqlens_q.tolist() == [0, 2, 3, 7]
    assert runs.cu_seqlens_k.tolist() == [0, 3, 4, 6]
    assert (runs.max_seqlen_q, runs.max_seqlen_k) == (4, 3)
    assert runs.cu_seqlens_q.is_contiguous()
    assert runs.cu_seqlens_k.is_contiguous()
