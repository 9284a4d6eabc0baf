"""Which attention kernel a run can use, and why."""

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
    """The inputs of attention in a run: sizes are those of one process."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    head_dim: int
    length: int
    """Positions of a sequence."""
    dropout: float = 0.0
    documents: bool = False
    """Tokens attend within their document only."""
    cut: bool = False
    """Sequences come in slices, whose queries also attend to the keys of earlier slices."""
    compiled: bool = False
    """Attention is part of a compiled block."""
    scores: ScoreModifiers = PLAIN
    """Those of a layer, of as many heads as there are here."""

    @property
    def written_out(self) -> bool:
        """Whether no backend of torch's SDPA computes it, or none as well (see :class:`Sdpa`)."""
        scores = self.scores.among(self.length)
        return scores.softcap is not None or not (self.device.type == "cuda" or scores.plain)


def candidates(given: AttentionShape) -> list[Candidate[AttentionKernel]]:
    """On a GPU flash for packed documents and FlexAttention for scores that are not plain, then
    SDPA; the others are used when named."""
    flash_attn = Candidate(
        "flash_attn", partial(_flash_attn, given), partial(_check, given), "flash-attn"
    )
    varlen = Candidate("varlen", partial(_varlen, given), partial(_check, given))
    flex = Candidate("flex", partial(_flex, given), partial(_check, given))
    named = [Candidate(name, partial(_pinned, given, name)) for name in _BACKENDS]
    auto: Candidate[AttentionKernel] = Candidate("SDPA", Sdpa)
    first = []
    if given.device.type == "cuda":
        first += [varlen] if given.documents else []
        first += [] if given.scores.among(given.length).plain else [flex]
    others = [each for each in (flash_attn, varlen, flex) if each not in first]
    return [*first, auto, *named, *others]


EFFICIENT_BYTES = 16
"""Heads of the efficient backend are multiples of so many bytes."""
_BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}


def planned_backend(
    dtype: torch.dtype, head_dim: int, allowed: Collection[str], *, masked: bool, grouped: bool
) -> str:
    """The SDPA backend that torch takes on a GPU of compute capability 8.0, of those `allowed`, by
    the rules of aten/native/transformers/cuda/sdp_utils.cpp. `masked`: with a mask that is not just
    causal. `grouped`: fewer key heads.

    From 9.0 on torch takes cuDNN's before flash, if that is newer than 9.15.1; the two keep the
    same tensors. Raises :class:`Unavailable` where none can be used.
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


def torch_choice(given: AttentionShape, only: str | None = None) -> str:
    """The SDPA backend that torch chooses for a run's attention; `only` allows no other.

    Raises :class:`Unavailable`, with torch's reasons, where torch has none for it.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    allowed = [only] if only is not None else list(_BACKENDS)
    scores = given.scores.among(given.length)
    masked = given.documents or (given.cut and given.device.type == "cpu") or not scores.plain
    if is_planned():
        grouped = given.heads != given.groups
        return planned_backend(given.dtype, given.head_dim, allowed, masked=masked, grouped=grouped)
    shapes = [(1, n, given.length, given.head_dim) for n in (given.heads, given.groups)]
    q, k = (
        torch.empty(shape, dtype=given.dtype, device=given.device, requires_grad=True)
        for shape in shapes
    )
    mask = None
    if masked:
        dtype = torch.bool if scores.slopes is None else given.dtype
        mask = torch.empty(1, 1, given.length, given.length, dtype=dtype, device=given.device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel([getattr(SDPBackend, _BACKENDS[name]) for name in allowed]):
                number = torch._fused_sdp_choice(
                    q,
                    k,
                    k,
                    mask,
                    given.dropout,
                    mask is None,
                    enable_gqa=given.heads != given.groups,
                )
        except RuntimeError as error:
            number, problem = -1, first_line(error)
        else:
            problem = "torch has no kernel for it"
    for name in allowed:
        if int(getattr(SDPBackend, _BACKENDS[name])) == number:
            return name
    raise Unavailable(_reason([str(w.message) for w in said]) or problem)


def _reason(messages: Sequence[str]) -> str:
    """torch's reasons in one line, without headings and places in torch's sources."""
    said = [message.partition(" (Triggered internally")[0].strip() for message in messages]
    return "; ".join(dict.fromkeys(line.rstrip(".") for line in said if "because:" not in line))


def _pinned(given: AttentionShape, name: str) -> AttentionKernel:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if name in ("efficient", "cudnn"):
        needs_cuda(given.device)
    if name == "math" and given.compiled:
        raise Unavailable("is taken apart by inductor and put together wrong (kernels.compile)")
    if given.scores.softcap is not None:
        raise Unavailable("has no soft-capped scores (model.attention_softcap)")
    if given.cut and name == "cudnn":
        raise Unavailable("takes no slices of sequences (pipeline.slices)")
    torch_choice(given, name)
    return Sdpa(partial(sdpa_kernel, getattr(SDPBackend, _BACKENDS[name])))


def _flash_attn(given: AttentionShape) -> AttentionKernel:
    needs_cuda(given.device)
    needs_no_graph(given.compiled)
    needs_half(given.dtype)
    package = load_module("flash_attn", "flash-attn")
    if not package.__version__.startswith("2."):
        raise Unavailable(f"flash-attn {package.__version__} is installed, not 2.x")
    return FlashAttn(package)


def _varlen(given: AttentionShape) -> AttentionKernel:
    needs_cuda(given.device)
    needs_no_graph(given.compiled)
    needs_half(given.dtype)
    _needs_no_dropout(given)
    if given.scores.softcap is not None:
        raise Unavailable("has no soft-capped scores (model.attention_softcap)")
    if given.scores.slopes is not None:
        raise Unavailable("has no biases by distance (model.positions=alibi)")
    varlen_attn = load_module("torch.nn.attention.varlen", "torch").varlen_attn
    if not {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        raise Unavailable(f"torch {torch.__version__} has an earlier varlen_attn")
    return Varlen(varlen_attn)


def _flex(given: AttentionShape) -> AttentionKernel:
    needs_no_graph(given.compiled)
    needs_cuda(given.device)
    _needs_no_dropout(given)
    module = load_module("torch.nn.attention.flex_attention", "torch")
    if is_planned():  # it takes a second to prepare what will not be called
        return Flex(module.flex_attention)
    return Flex(torch.compile(module.flex_attention, dynamic=False))


def _needs_no_dropout(given: AttentionShape) -> None:
    if given.dropout:
        raise Unavailable(f"has no dropout, and model.dropout is {given.dropout}")


def _check(given: AttentionShape, kernel: AttentionKernel) -> None:
    """Compare with SDPA's plain arithmetic, with and without documents, whole and sliced."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    scores, b, t = given.scores, 2, 256
    if scores.window is not None:
        scores = scores._replace(window=min(scores.window, 100))
    math: AttentionKernel = Sdpa(partial(sdpa_kernel, SDPBackend.MATH))
    plain = math if scores.softcap is None else Sdpa()
    breaks = torch.zeros(b, t, dtype=torch.long)
    breaks[0, 40] = breaks[0, 200] = breaks[1, 129] = 1
    documents = Documents(breaks.cumsum(-1), given.device)

    def results(of: AttentionKernel, precision: torch.dtype) -> list[Tensor]:
        found: list[Tensor] = []
        for s in [t, 100] if given.cut else [t]:
            q_shape = (b, given.heads, s, given.head_dim)
            k_shape = (b, given.groups, t, given.head_dim)
            shapes = [q_shape, k_shape, k_shape, q_shape]
            q, k, v, grad = small_data(shapes, given.dtype, precision, given.device)
            y = of(q, k, v, 0.0, documents if given.documents else None, scores)
            found += [y, *torch.autograd.grad(y, [q, k, v], grad)]
        return found

    agree(kernel, plain, results, given.dtype)
