"""The section `kernels.only` of the configuration: the kernel of each operation."""

from __future__ import annotations

from typing import Literal, get_args

from megapipe.config.section import OnResume, Section


class OnlyKernels(Section):
    """The only kernel that an operation may use. auto: the fastest kernel that works on the device
    and agrees with torch's kernel on small data; the run prints which kernel it chose and why. A
    kernel that is requested by name and cannot be used is an error."""

    ON_RESUME = OnResume.HARMLESS

    attention: Literal[
        "auto", "flash", "efficient", "cudnn", "math", "flash_attn", "varlen", "flex"
    ] = "auto"
    """Attention. flash, efficient, cudnn, math: backends of torch's scaled_dot_product_attention,
    among which auto lets torch choose; flash_attn: the package flash-attn; varlen, flex: torch's
    kernels for documents of any length (see data.document_mask), of which auto takes varlen. If
    attention is computed in tiles (parallel.cp, activations.keep_attention), the kernel must return
    the log-sum-exp: flash, efficient, cudnn or flash_attn; auto takes the first usable one, or
    plain arithmetic."""
    norm: Literal["auto", "torch", "apex", "liger"] = "auto"
    """Layernorm and rmsnorm: torch's kernels, NVIDIA apex's or Liger's."""
    rotary: Literal["auto", "torch", "inductor"] = "auto"
    """Rotation of queries and keys: torch's operations, or two kernels made by inductor, which
    takes seconds at start. auto is inductor on a GPU, for `rotary`, `swiglu` and `loss`."""
    swiglu: Literal["auto", "torch", "inductor", "liger"] = "auto"
    """Gate of a swiglu MLP: torch's kernel, inductor's or Liger's."""
    loss: Literal["auto", "torch", "inductor"] = "auto"
    """Elementwise work between the GEMMs of a chunked loss (`kernels.loss_chunk_tokens`): torch's
    operations, or two kernels made by inductor, which read the logits without an fp32 copy."""
    weight_grad: Literal["auto", "torch", "fused", "apex"] = "auto"
    """Weight gradients in bf16 and fp16 on a GPU: a GEMM and a sum into the fp32 main gradient
    (torch), or both in one kernel of torch (fused) or of NVIDIA apex (apex)."""
    expert_gemm: Literal["auto", "loop", "grouped"] = "auto"
    """GEMMs of experts in F and I: one after the other (loop), or all in one torch kernel
    (grouped), which auto chooses on a GPU in bf16. W adds each expert's gradient with the kernel of
    `weight_grad`, in fp32."""
    moe_elementwise: Literal["auto", "torch", "inductor"] = "auto"
    """Elementwise work around the experts' GEMMs (activation times the weight of the choice, sums
    of a token's rows): torch's operations, or one or two kernels each, made by inductor, which
    takes seconds at start. auto is inductor on a GPU."""
    optimizer: Literal["auto", "torch", "apex"] = "auto"
    """Update of adamw and adam: torch's fused kernel or NVIDIA apex's."""


OPTIONAL_KERNELS = sorted(
    {kernel for info in OnlyKernels.model_fields.values() for kernel in get_args(info.annotation)}
    - {"auto", "torch", "loop", "math", "flash", "efficient", "cudnn"}
)
"""Kernels that ``kernels.without`` may exclude from the choice of `auto`. Torch's attention
backends are not listed, because torch itself chooses among these."""
