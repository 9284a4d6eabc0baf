"""torch's GPU attention kernels in plain arithmetic, with the rules of the real ones.

The rules are those of torch's sources: types, head sizes, shapes, and the memory of the LSE.
"""

from __future__ import annotations

from typing import Any

from tests.fake_cuda.packed_attention import install_packed


def install() -> Any:
    """Register the kernels for the device; return what keeps them registered."""
    import torch
    from torch import Tensor

    from megapipe.ops.tile_attention import MathTile

    plain, half = MathTile(), (torch.bfloat16, torch.float16)
    library = torch.library.Library("aten", "IMPL")

    def check(*rows: Tensor, dtypes: Any, grouped: bool) -> None:
        q, k, v, *others = rows
        assert q.dtype in dtypes, f"no kernel for {q.dtype}"
        assert q.shape[-1] % 8 == 0, f"heads of {q.shape[-1]}"
        assert k.shape == v.shape
        assert q.shape[1] % k.shape[1] == 0 if grouped else q.shape[1] == k.shape[1]
        assert all(x.shape == q.shape for x in others)
        assert all(x.stride(-1) == 1 for x in rows), "the values of a head are not neighbours"
        assert len({x.dtype for x in rows}) == 1

    def forward(name: str, dtypes: Any, *, grouped: bool) -> Any:
        def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Any) -> tuple[Tensor, Tensor]:
            check(q, k, v, dtypes=dtypes, grouped=grouped)
            assert not causal or q.shape[2] == k.shape[2]
            return plain.forward(q, k, v, causal, scale)

        return run

    of_flash = forward("flash", half, grouped=True)
    of_efficient = forward("efficient", (torch.float32, *half), grouped=False)

    def state(like: Tensor, dtype: Any) -> tuple[Tensor, Tensor]:
        return like.new_empty(2, dtype=dtype), like.new_empty(0, dtype=dtype)

    def flash(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float = 0.0,
        causal: bool = False,
        debug: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        out, lse = of_flash(q, k, v, causal, scale)
        sizes = q.shape[2], k.shape[2]
        return out, lse, None, None, *sizes, *state(q, torch.uint64), q.new_empty(0)

    def cudnn(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        with_lse: bool,
        dropout: float = 0.0,
        causal: bool = False,
        debug: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        assert with_lse
        out, lse = of_flash(q, k, v, causal, scale)
        sizes = q.shape[2], k.shape[2]
        state_of = state(q, torch.int64)
        return out, lse.unsqueeze(-1), None, None, *sizes, *state_of, q.new_empty(0)

    def efficient(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        with_lse: bool,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        assert with_lse
        out, lse = of_efficient(q, k, v, causal, scale)
        lse = torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=float("inf"))
        return out, lse, *state(q, torch.int64)

    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float | None,
        dtypes: Any,
        grouped: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        check(q, k, v, grad, out, dtypes=dtypes, grouped=grouped)
        assert lse.is_contiguous(), "the kernel reads the LSE as one array"
        assert lse.dtype == torch.float32
        return plain.backward(grad, q, k, v, out, lse[..., : q.shape[2]], causal, scale)

    def flash_backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        q_ends: Any,
        k_ends: Any,
        most_q: int,
        most_k: int,
        dropout: float,
        causal: bool,
        seed: Tensor,
        offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert (lse.shape, seed.dtype) == (q.shape[:3], torch.uint64)
        assert (most_q, most_k) == (q.shape[2], k.shape[2])
        return backward(grad, q, k, v, out, lse, causal, scale, half, True)

    def cudnn_backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        seed: Tensor,
        offset: Tensor,
        bias: Any,
        q_ends: Any,
        k_ends: Any,
        most_q: int,
        most_k: int,
        dropout: float,
        causal: bool,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert (lse.shape, seed.dtype) == ((*q.shape[:3], 1), torch.int64)
        return backward(grad, q, k, v, out, lse.squeeze(-1), causal, scale, half, True)

    def efficient_backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Any,
        out: Tensor,
        lse: Tensor,
        seed: Tensor,
        offset: Tensor,
        dropout: float,
        wanted: list[bool],
        causal: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        assert lse.shape == (*q.shape[:2], -(-q.shape[2] // 32) * 32)
        assert lse[..., q.shape[2] :].isposinf().all()
        assert wanted == [True, True, True, False]
        if q.dtype in half:
            inside = out.transpose(1, 2)  # whatever the strides say
            assert inside.is_contiguous(), "the kernel reads the output as [b, s, heads, d]"
        dtypes = (torch.float32, *half)
        return *backward(grad, q, k, v, out, lse, causal, scale, dtypes, False), None

    for name, function in (("flash", flash), ("cudnn", cudnn), ("efficient", efficient)):
        library.impl(f"_scaled_dot_product_{name}_attention", function, "CUDA")
    for name, of in (
        ("flash", flash_backward),
        ("cudnn", cudnn_backward),
        ("efficient", efficient_backward),
    ):
        library.impl(f"_scaled_dot_product_{name}_attention_backward", of, "CUDA")
    install_packed(library)
    return library
