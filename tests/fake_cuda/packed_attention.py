"""torch's flash attention for variable lengths on a GPU in plain arithmetic, with its rules.

The rules are those of ``mha_varlen_fwd`` and ``mha_varlen_bwd`` in torch's sources. The host does
not read where sequences end. Memory that the kernels do not write is NaN: rows of no sequence, or
beyond the longest length that the caller gave.
"""

from __future__ import annotations

from typing import Any, NamedTuple


def install_packed(library: Any) -> None:
    """Register the kernels for the device."""
    import torch
    from torch import Tensor

    class Places(NamedTuple):
        """For rows [n]: each row's sequence, its position in it, and the sequence's length."""

        sequence: Tensor
        place: Tensor
        length: Tensor
        known: Tensor

        @classmethod
        def of(cls, rows: int, ends: Tensor, most: int) -> Places:
            number = torch.arange(rows, device=ends.device, dtype=torch.int32)
            sequence = torch.searchsorted(ends[1:], number, right=True)
            inside = sequence < len(ends) - 1
            at = sequence.clamp(max=len(ends) - 2)
            place = number - ends[at]
            return cls(sequence, place, ends[at + 1] - ends[at], inside & (place < most))

    def check(
        q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, dropout: float
    ) -> None:
        assert q.dtype in (torch.bfloat16, torch.float16), f"no kernel for {q.dtype}"
        assert q.dtype == k.dtype == v.dtype
        assert q.ndim == k.ndim == 3
        assert k.shape == v.shape
        assert q.shape[-1] == k.shape[-1]
        assert q.shape[-1] % 8 == 0, f"heads of {q.shape[-1]}"
        assert q.shape[-1] <= 256
        assert q.shape[1] % k.shape[1] == 0
        assert all(x.stride(-1) == 1 for x in (q, k, v)), "values of a head are not neighbours"
        assert q_ends.shape == k_ends.shape
        assert len(q_ends) > 1, "no sequence"
        for ends in (q_ends, k_ends):
            assert (ends.dtype, ends.device) == (torch.int32, q.device)
            assert ends.is_contiguous()
        assert dropout == 0.0

    def seen(of_q: Places, of_k: Places, causal: bool) -> Tensor:
        """Return the mask [rows, keys]; the last query of a sequence sees its last key."""
        same = of_q.sequence[:, None] == of_k.sequence
        if causal:
            more = same.sum(1) - of_q.length  # keys than queries
            same &= of_k.place <= (of_q.place + more)[:, None]
        return same & of_k.known & of_q.known[:, None]

    def scores(q: Tensor, k: Tensor, mask: Tensor, scale: float | None) -> Tensor:
        """Return scores [groups, n, rows, keys] in fp32."""
        wide = q.float().transpose(0, 1).unflatten(0, (k.shape[1], -1))
        x = wide @ k.float().transpose(0, 1).unsqueeze(1).mT
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        return (x * factor).masked_fill(~mask, float("-inf"))

    def narrow(x: Tensor, like: Tensor, known: Tensor) -> Tensor:
        """Return [heads, n, d] in the memory layout and type of `like`, [n, heads, d]."""
        rows = x.transpose(0, 1).masked_fill(~known[:, None, None], torch.nan)
        return torch.empty_like(like).copy_(rows)

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_ends: Tensor,
        k_ends: Tensor,
        most_q: int,
        most_k: int,
        dropout: float,
        causal: bool,
        debug: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, ...]:
        check(q, k, v, q_ends, k_ends, dropout)
        assert not debug
        assert not others
        assert window_size_left is None
        assert window_size_right is None
        if most_q == 1 and q.shape[1] > k.shape[1]:
            assert len(q) == len(q_ends) - 1, "heads take the place of queries: one a sequence"
        of_q, of_k = Places.of(len(q), q_ends, most_q), Places.of(len(k), k_ends, most_k)
        x = scores(q, k, seen(of_q, of_k, causal), scale)
        lse = x.logsumexp(-1, keepdim=True)
        shares = (x - lse).exp().masked_fill(lse.isneginf(), 0.0)
        out = shares @ v.float().transpose(0, 1).unsqueeze(1)
        lse = lse.masked_fill(lse.isneginf(), float("inf")).squeeze(-1)
        lse = lse.masked_fill(~of_q.known, torch.nan).flatten(0, 1).contiguous()
        state = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
        return narrow(out.flatten(0, 1), q, of_q.known), lse, *state, q.new_empty(0)

    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        q_ends: Tensor,
        k_ends: Tensor,
        most_q: int,
        most_k: int,
        dropout: float,
        causal: bool,
        state: Tensor,
        unused: Tensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        check(q, k, v, q_ends, k_ends, dropout)
        assert grad.shape == out.shape == q.shape
        assert grad.dtype == out.dtype == q.dtype
        assert (lse.shape, lse.dtype) == ((q.shape[1], len(q)), torch.float32)
        assert lse.is_contiguous(), "the kernel reads the LSE as one array"
        assert state.device == unused.device == q.device
        assert window_size_left is None
        assert window_size_right is None
        of_q, of_k = Places.of(len(q), q_ends, most_q), Places.of(len(k), k_ends, most_k)
        groups = k.shape[1]
        wide_q, wide_grad, wide_out = (
            x.float().transpose(0, 1).unflatten(0, (groups, -1)) for x in (q, grad, out)
        )
        x = scores(q, k, seen(of_q, of_k, causal), scale)
        shares = (x - lse.unflatten(0, (groups, -1)).unsqueeze(-1)).exp()
        mean = (wide_grad * wide_out).sum(-1, keepdim=True)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        grad_x = (wide_grad @ v.float().transpose(0, 1).unsqueeze(1).mT - mean) * shares * factor
        grad_q = (grad_x @ k.float().transpose(0, 1).unsqueeze(1)).flatten(0, 1)
        grad_k, grad_v = (grad_x.mT @ wide_q).sum(1), (shares.mT @ wide_grad).sum(1)
        found = (grad_q, q, of_q), (grad_k, k, of_k), (grad_v, v, of_k)
        grads = [narrow(each, like, of.known) for each, like, of in found]
        return grads[0], grads[1], grads[2]

    library.impl("_flash_attention_forward", forward, "CUDA")
    library.impl("_flash_attention_backward", backward, "CUDA")
