"""Attention kernels against one written out, whole, in slices, and within documents."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megapipe.errors import ConfigError
from megapipe.ops.attention import AttentionKernel, FlashAttn, Flex, Sdpa, Varlen
from megapipe.ops.attention_choice import AttentionShape, candidates, torch_choice
from megapipe.ops.documents import Documents, document_ids
from megapipe.ops.probe import choose_kernel, load_module
from megapipe.ops.scores import PLAIN, ScoreModifiers, alibi_slopes
from tests.parity.tiers import in_parts
from tests.unit.ops.fakes import flash_attn, on_any_device, plain_attention, varlen

CPU = torch.device("cpu")
B, T, D = 3, 12, 8
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 3], [0] * T, list(range(T))])
"""Four documents, one, and one per token."""


def expected(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, **options: Any) -> Tensor:
    """Compute each document by itself, then put the outputs together."""
    s = q.shape[2]
    y = torch.empty_like(q)
    for row in range(B):
        for document in ids[row].unique():
            keys = (ids[row] == document).nonzero().flatten()
            queries = keys[keys >= T - s] - (T - s)
            if len(queries):
                out = plain_attention(
                    q[row, :, queries].transpose(0, 1),
                    k[row, :, keys].transpose(0, 1),
                    v[row, :, keys].transpose(0, 1),
                    **options,
                )
                y[row, :, queries] = out.transpose(0, 1)
    return y


def inputs(s: int, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(s)
    shapes = [(B, 4, s, D), (B, groups, T, D), (B, groups, T, D)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


SDPA = {
    "auto": Sdpa(),
    "flash": Sdpa(partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)),
    "math": Sdpa(partial(sdpa_kernel, SDPBackend.MATH)),
}


@pytest.fixture(params=[*SDPA, "flash_attn", "varlen"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionKernel:
    if request.param == "flash_attn":
        flash_attn(monkeypatch)
        return FlashAttn(load_module("flash_attn", "flash-attn"))
    if request.param == "varlen":
        varlen(monkeypatch)
        return Varlen(load_module("torch.nn.attention.varlen", "torch").varlen_attn)
    return SDPA[request.param]


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("s", [T, 5, 1])
def test_values_and_gradients(
    kernel: AttentionKernel, s: int, groups: int, with_documents: bool
) -> None:
    ids = IDS if with_documents else torch.zeros_like(IDS)
    documents = Documents(ids, CPU) if with_documents else None
    leaves = [x.requires_grad_() for x in inputs(s, groups, torch.float64)]
    right = expected(*leaves, ids)
    y = kernel(*leaves, 0.0, documents)
    torch.testing.assert_close(y, right, rtol=1e-12, atol=1e-12)
    grad = torch.randn(y.shape, dtype=torch.float64)
    found = torch.autograd.grad(y, leaves, grad)
    for ours, plain in zip(found, torch.autograd.grad(right, leaves, grad), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11)


SLOPES = alibi_slopes(6)[2:]
"""Slopes of the last four of six heads."""
SCORES = {
    "scale": ScoreModifiers(scale=0.3),
    "window": ScoreModifiers(window=4),
    "alibi": ScoreModifiers(slopes=SLOPES),
    "soft-cap": ScoreModifiers(softcap=0.8),
    "all": ScoreModifiers(0.3, 0.8, SLOPES, 4),
}


def has(kernel: AttentionKernel, scores: ScoreModifiers) -> bool:
    """Whether it is ever called with such scores."""
    if isinstance(kernel, Varlen):
        return scores.softcap is None and scores.slopes is None
    return not isinstance(kernel, Sdpa) or kernel.pinned is None or scores.softcap is None


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(("s", "groups"), [(T, 4), (5, 2), (1, 1)])
def test_scores_that_are_not_plain(
    kernel: AttentionKernel, s: int, groups: int, name: str, with_documents: bool
) -> None:
    scores = SCORES[name]
    if not has(kernel, scores):
        return
    ids = IDS if with_documents else torch.zeros_like(IDS)
    documents = Documents(ids, CPU) if with_documents else None
    leaves = [x.requires_grad_() for x in inputs(s, groups, torch.float64)]
    own = {"scale": scores.scale, "cap": scores.softcap, "slopes": scores.slopes}
    right = expected(*leaves, ids, window=scores.window, **own)
    y = kernel(*leaves, 0.0, documents, scores)
    torch.testing.assert_close(y, right, rtol=1e-12, atol=1e-12)
    grad = torch.randn(y.shape, dtype=torch.float64)
    found = torch.autograd.grad(y, leaves, grad)
    for ours, plain in zip(found, torch.autograd.grad(right, leaves, grad), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11)


def test_slopes_of_alibi() -> None:
    """8 heads have powers of two; 12 heads have these and every other one of 16 heads."""
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(12) == (*alibi_slopes(8), *alibi_slopes(16)[:8:2])
    assert alibi_slopes(1) == (2.0**-8,)


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize(("s", "groups"), [(T, 4), (5, 2)])
@in_parts("scores", [PLAIN, *SCORES.values()], default=4, full=4)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex(s: int, groups: int, with_documents: bool, scores: ScoreModifiers) -> None:
    """The values are right; there is no backward on the CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    ids = IDS if with_documents else torch.zeros_like(IDS)
    documents = Documents(ids, CPU) if with_documents else None
    q, k, v = inputs(s, groups, torch.float64)
    with torch.no_grad():
        y = Flex(flex_attention)(q, k, v, 0.0, documents, scores)
    own = {"scale": scores.scale, "cap": scores.softcap, "slopes": scores.slopes}
    right = expected(q, k, v, ids, window=scores.window, **own)
    # slopes are fp32 there
    limit = 1e-12 if scores.slopes is None else 1e-6
    torch.testing.assert_close(y, right, rtol=limit, atol=limit)


def test_document_ids() -> None:
    """The end of a document is part of it."""
    tokens = torch.tensor([[1, 9, 2, 9, 9, 3], [9, 1, 2, 3, 4, 9], [1, 2, 3, 4, 5, 6]])
    assert document_ids(tokens, 9).tolist() == [
        [0, 0, 1, 1, 2, 3],
        [0, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0],
    ]


def test_the_forms_of_documents() -> None:
    documents = Documents(IDS[:2], CPU)
    runs = documents.runs(T)
    assert runs.cu_seqlens_q.tolist() == runs.cu_seqlens_k.tolist() == [0, 3, 8, 9, 12, 24]
    assert (runs.max_seqlen_q, runs.max_seqlen_k) == (12, 12)
    runs = documents.runs(4)
    assert runs.cu_seqlens_q.tolist() == [0, 0, 0, 1, 4, 8]
    assert runs.cu_seqlens_k.tolist() == [0, 3, 8, 9, 12, 24]
    assert (runs.max_seqlen_q, runs.max_seqlen_k) == (4, 12)
    assert documents.mask(4).shape == (2, 1, 4, T)
    for i, j in itertools.product(range(4), range(T)):
        seen = IDS[0, i + 8] == IDS[0, j] and j <= i + 8
        assert documents.mask(4)[0, 0, i, j] == seen
    assert documents.mask(4) is documents.mask(4), "made once"
    assert documents.runs(4) is documents.runs(4)


GIVEN = AttentionShape(CPU, torch.float32, heads=4, groups=4, head_dim=16, length=32)


def given(**changes: object) -> AttentionShape:
    return AttentionShape(**{**vars(GIVEN), **changes})  # type: ignore[arg-type]


def test_torchs_choice() -> None:
    assert torch_choice(GIVEN) == "flash"
    assert torch_choice(given(dropout=0.1)) == "math"
    assert torch_choice(given(documents=True)) == "flash"
    assert torch_choice(given(dtype=torch.float64, groups=1, cut=True)) == "flash"
    assert torch_choice(GIVEN, "math") == "math"


def test_torchs_choice_is_what_runs() -> None:
    """The operation in the graph has its name."""
    operations = {"flash": "FlashAttention", "math": "UnsafeView"}
    for dropout in (0.0, 0.1):
        q = torch.randn(1, 4, 32, 16, requires_grad=True)
        function = Sdpa()(q, q, q, dropout, None).grad_fn
        assert operations[torch_choice(given(dropout=dropout))] in type(function).__name__


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("flash", {"dropout": 0.1}, "do not support non-zero dropout"),
        ("efficient", {}, "needs a GPU"),
        ("cudnn", {}, "needs a GPU"),
        ("flash_attn", {}, "needs a GPU"),
        ("varlen", {}, "needs a GPU"),
        ("flex", {}, "needs a GPU"),
    ],
)
def test_kernels_that_the_cpu_has_not(name: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^kernels.only.attention={name}: [^\n]*{said}; expected"
    ):
        choose_kernel("attention", name, candidates(given(**changes)))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("flash_attn", {}, "takes bf16 and fp16, not float32"),
        ("flash_attn", {"dtype": torch.bfloat16}, "flash-attn is not installed"),
        ("varlen", {"dtype": torch.bfloat16, "dropout": 0.1}, "has no dropout, and model.dropout"),
        ("flex", {"dropout": 0.1}, "has no dropout, and model.dropout is 0.1"),
    ],
)
def test_kernels_that_the_model_rules_out(
    name: str, changes: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_any_device(monkeypatch)
    with pytest.raises(ConfigError, match=f"kernels.only.attention={name}: {said}"):
        choose_kernel("attention", name, candidates(given(**changes)))


@pytest.mark.parametrize("fake", [flash_attn, varlen])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_the_self_check(
    fake: Callable[[pytest.MonkeyPatch], None],
    documents: bool,
    cut: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_any_device(monkeypatch)
    fake(monkeypatch)
    what = given(dtype=torch.bfloat16, groups=2, documents=documents, cut=cut)
    assert choose_kernel("attention", fake.__name__, candidates(what)).name == fake.__name__


def test_a_kernel_that_ignores_documents_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_device(monkeypatch)
    varlen(monkeypatch)
    right = Documents.runs
    monkeypatch.setattr(Documents, "runs", lambda self, s: right(Documents(0 * self.ids, CPU), s))
    what = given(dtype=torch.bfloat16, documents=True)
    with pytest.raises(
        ConfigError, match=r"kernels.only.attention=varlen: result 0 of its self-check"
    ):
        choose_kernel("attention", "varlen", candidates(what))


def test_an_unknown_version_of_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_device(monkeypatch)
    flash_attn(monkeypatch, version="1.0.9")
    with pytest.raises(ConfigError, match=r"flash-attn 1.0.9 is installed, not 2.x"):
        choose_kernel("attention", "flash_attn", candidates(given(dtype=torch.bfloat16)))


def test_an_earlier_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_device(monkeypatch)
    varlen(monkeypatch)
    module = load_module("torch.nn.attention.varlen", "torch")
    monkeypatch.setattr(module, "varlen_attn", lambda q, k, v, is_causal=False: q)
    with pytest.raises(ConfigError, match="has an earlier varlen_attn"):
        choose_kernel(
            "attention", "varlen", candidates(given(dtype=torch.bfloat16, documents=True))
        )


def test_each_kernel_is_offered_once_on_a_gpu() -> None:
    """Kernels that come first for documents or windows are, too: one is taken by its name."""
    on_gpu = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    windowed = ScoreModifiers(window=4)
    for changes in ({}, {"documents": True}, {"documents": True, "scores": windowed}):
        names = [each.name for each in candidates(given(**on_gpu, **changes))]
        assert sorted(names) == sorted(set(names))
        assert {"varlen", "flex", "flash_attn"} <= set(names)
