"""Selection of the attention kernel of a run, with the reasons."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megapipe.ops.attention import AttentionKernel, FlashAttn, Flex, Sdpa, Varlen
from megapipe.ops.documents import Documents
from megapipe.ops.probe import (
    Candidate,
    Unavailable,
    agree,
    first_line,
    is_planned,
    load_module,
    needs_cuda,
    needs_half,
    needs_no_graph,
    small_data,
)
from megapipe.ops.scores import PLAIN, ScoreModifiers


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and options of a run's attention, in one process."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    head_dim: int
    length: int
    """Number of positions of a sequence."""
    dropout: float = 0.0
    documents: bool = False
    """Whether tokens attend only within their document."""
    cut: bool = False
    """Whether sequences come in slices, whose queries also attend to the keys of earlier slices."""
    compiled: bool = False
    """Whether attention is part of a compiled block."""
    scores: ScoreModifiers = PLAIN
    """Score modifiers of a layer, for the heads of this process."""

    @property
    def written_out(self) -> bool:
        """Whether :class:`Sdpa` uses :func:`math_attention` (plain operations), not a backend."""
        scores = self.scores.among(self.length)
        return scores.softcap is not None or not (self.device.type == "cuda" or scores.plain)


def candidates(attention: AttentionShape) -> list[Candidate[AttentionKernel]]:
    """Return the kernels by preference. On a GPU, varlen flash for documents and FlexAttention for
    modified scores come before SDPA. The kernels after SDPA are used only if named."""
    flash_attn = Candidate(
        "flash_attn", partial(_flash_attn, attention), partial(_check, attention), "flash-attn"
    )
    varlen = Candidate("varlen", partial(_varlen, attention), partial(_check, attention))
    flex = Candidate("flex", partial(_flex, attention), partial(_check, attention))
    named = [Candidate(name, partial(_pinned, attention, name)) for name in _BACKENDS]
    auto: Candidate[AttentionKernel] = Candidate("SDPA", Sdpa)
    first = []
    if attention.device.type == "cuda":
        first += [varlen] if attention.documents else []
        first += [] if attention.scores.among(attention.length).plain else [flex]
    others = [each for each in (flash_attn, varlen, flex) if each not in first]
    return [*first, auto, *named, *others]


EFFICIENT_BYTES = 16
"""Alignment of head sizes, in bytes, that SDPA's efficient backend needs."""
_BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}


def planned_backend(
    dtype: torch.dtype, head_dim: int, allowed: Collection[str], *, masked: bool, grouped: bool
) -> str:
    """Return the SDPA backend in `allowed` that torch takes on a GPU of compute capability 8.0, by
    the rules of aten/native/transformers/cuda/sdp_utils.cpp. `masked` says whether the mask is more
    than causal, `grouped` whether there are fewer KV heads than query heads.

    From capability 9.0 on torch prefers cuDNN to flash, if cuDNN is newer than 9.15.1; both save
    the same tensors. Raises :class:`Unavailable` if no backend can be used.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    usable = {
        "flash": half and head_dim <= 256 and not masked,
        "efficient": (half or dtype == torch.float32)
        and not head_dim % (EFFICIENT_BYTES // dtype.itemsize)
        and not grouped,
        "math": True,
        "cudnn": half and head_dim <= 128 and not head_dim % 8,
    }
    for name, can in usable.items():
        if can and name in allowed:
            return name
    raise Unavailable("torch has no kernel for it")


def torch_choice(attention: AttentionShape, only: str | None = None) -> str:
    """Return the SDPA backend that torch chooses for a run's attention. If `only` is given, this is
    the only backend allowed.

    Raises :class:`Unavailable`, with torch's reasons, if torch has no backend for this attention.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    allowed = [only] if only is not None else list(_BACKENDS)
    scores = attention.scores.among(attention.length)
    masked = (
        attention.documents
        or (attention.cut and attention.device.type == "cpu")
        or not scores.plain
    )
    if is_planned():
        grouped = attention.heads != attention.groups
        return planned_backend(
            attention.dtype, attention.head_dim, allowed, masked=masked, grouped=grouped
        )
    shapes = [
        (1, n, attention.length, attention.head_dim) for n in (attention.heads, attention.groups)
    ]
    q, k = (
        torch.empty(shape, dtype=attention.dtype, device=attention.device, requires_grad=True)
        for shape in shapes
    )
    mask = None
    if masked:
        dtype = torch.bool if scores.slopes is None else attention.dtype
        mask = torch.empty(
            1, 1, attention.length, attention.length, dtype=dtype, device=attention.device
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel([getattr(SDPBackend, _BACKENDS[name]) for name in allowed]):
                number = torch._fused_sdp_choice(
                    q,
                    k,
                    k,
                    mask,
                    attention.dropout,
                    mask is None,
                    enable_gqa=attention.heads != attention.groups,
                )
        except RuntimeError as error:
            number, problem = -1, first_line(error)
        else:
            problem = "torch has no kernel for it"
    for name in allowed:
        if int(getattr(SDPBackend, _BACKENDS[name])) == number:
            return name
    raise Unavailable(_reason([str(w.message) for w in caught]) or problem)


def _reason(messages: Sequence[str]) -> str:
    """Return torch's reasons in one line, without headings and locations in torch's sources."""
    reasons = [message.partition(" (Triggered internally")[0].strip() for message in messages]
    return "; ".join(dict.fromkeys(line.rstrip(".") for line in reasons if "because:" not in line))


def _pinned(attention: AttentionShape, name: str) -> AttentionKernel:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if name in ("efficient", "cudnn"):
        needs_cuda(attention.device)
    if name == "math" and attention.compiled:
        raise Unavailable("gives wrong results when inductor decomposes it (kernels.compile)")
    if attention.scores.softcap is not None:
        raise Unavailable("has no soft-capped scores (model.attention_softcap)")
    if attention.cut and name == "cudnn":
        raise Unavailable("does not support slices of sequences (pipeline.sequence_slices)")
    torch_choice(attention, name)
    return Sdpa(partial(sdpa_kernel, getattr(SDPBackend, _BACKENDS[name])))


def _flash_attn(attention: AttentionShape) -> AttentionKernel:
    needs_cuda(attention.device)
    needs_no_graph(attention.compiled)
    needs_half(attention.dtype)
    package = load_module("flash_attn", "flash-attn")
    if not package.__version__.startswith("2."):
        raise Unavailable(f"flash-attn {package.__version__} is installed, not 2.x")
    return FlashAttn(package)


def _varlen(attention: AttentionShape) -> AttentionKernel:
    needs_cuda(attention.device)
    needs_no_graph(attention.compiled)
    needs_half(attention.dtype)
    _needs_no_dropout(attention)
    if attention.scores.softcap is not None:
        raise Unavailable("has no soft-capped scores (model.attention_softcap)")
    if attention.scores.slopes is not None:
        raise Unavailable("has no biases by distance (model.positions=alibi)")
    varlen_attn = load_module("torch.nn.attention.varlen", "torch").varlen_attn
    if not {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        raise Unavailable(f"torch {torch.__version__} has an earlier varlen_attn")
    return Varlen(varlen_attn)


def _flex(attention: AttentionShape) -> AttentionKernel:
    needs_no_graph(attention.compiled)
    needs_cuda(attention.device)
    _needs_no_dropout(attention)
    module = load_module("torch.nn.attention.flex_attention", "torch")
    if is_planned():  # compiling takes a second, and the kernel will not be called
        return Flex(module.flex_attention)
    return Flex(torch.compile(module.flex_attention, dynamic=False))


def _needs_no_dropout(attention: AttentionShape) -> None:
    if attention.dropout:
        raise Unavailable(f"has no dropout, and model.dropout is {attention.dropout}")


def _check(attention: AttentionShape, kernel: AttentionKernel) -> None:
    """Compare `kernel` with SDPA's math backend, or plain operations for a soft cap, on small data:
    with documents and with slices if the run has them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    scores, b, t = attention.scores, 2, 256
    if scores.window is not None:
        scores = scores._replace(window=min(scores.window, 100))
    math: AttentionKernel = Sdpa(partial(sdpa_kernel, SDPBackend.MATH))
    plain = math if scores.softcap is None else Sdpa()
    breaks = torch.zeros(b, t, dtype=torch.long)
    breaks[0, 40] = breaks[0, 200] = breaks[1, 129] = 1
    documents = Documents(breaks.cumsum(-1), attention.device)

    def results(of: AttentionKernel, precision: torch.dtype) -> list[Tensor]:
        found: list[Tensor] = []
        for s in [t, 100] if attention.cut else [t]:
            q_shape = (b, attention.heads, s, attention.head_dim)
            k_shape = (b, attention.groups, t, attention.head_dim)
            shapes = [q_shape, k_shape, k_shape, q_shape]
            q, k, v, grad = small_data(shapes, attention.dtype, precision, attention.device)
            y = of(q, k, v, 0.0, documents if attention.documents else None, scores)
            found += [y, *torch.autograd.grad(y, [q, k, v], grad)]
        return found

    agree(kernel, plain, results, attention.dtype)
