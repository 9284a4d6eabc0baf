"""The kernels that the layers and the optimizer of a process use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from megapipe.ops.adam import AdamKernel, torch_adam
from megapipe.ops.attention import AttentionKernel, Sdpa
from megapipe.ops.block_attention import TileKernel
from megapipe.ops.compiler import Compiler
from megapipe.ops.dropout import DropoutKernel, torch_dropout
from megapipe.ops.loss import LossKernel, TorchLoss
from megapipe.ops.moe.grouped import GroupedKernel, loop_product
from megapipe.ops.moe.rows import MoEElementwiseKernel, TorchRows
from megapipe.ops.norm import NormKernel, torch_norm
from megapipe.ops.packed_kernels import PackedTileKernel
from megapipe.ops.probe import KernelChoice
from megapipe.ops.rotary import RotaryKernel, torch_rotate
from megapipe.ops.scores import ScoreModifiers
from megapipe.ops.swiglu import SwigluKernel, torch_swiglu
from megapipe.ops.weight_grad import AccumulateKernel, torch_accumulate


class SplitAttention(Protocol):
    """Attention by blocks: :class:`megapipe.layers.context.ContextAttention`."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mb: Any,
        scores: ScoreModifiers,
        layer: int,
        cache: Any = None,
    ) -> Tensor:
        """q [s, b, heads, d], k and v [s, b, groups, d] of the positions of a micro-batch that are
        here -> [s, b, heads, d]."""


@dataclass(frozen=True)
class Kernels:
    """One kernel per purpose; without arguments torch's own."""

    attention: AttentionKernel = field(default_factory=Sdpa)
    attention_tile: TileKernel | None = None
    """In the place of `attention`, where positions are split over ranks or results are kept."""
    packed_attention_tile: PackedTileKernel | None = None
    """Computes many of these blocks in one call, where attention ends at documents."""
    context: SplitAttention | None = None
    """Attends by these blocks."""
    norm: NormKernel = torch_norm
    head_norm: NormKernel = torch_norm
    """Of the queries and keys of each head."""
    rotary: RotaryKernel = torch_rotate
    swiglu: SwigluKernel = torch_swiglu
    loss: LossKernel = field(default_factory=TorchLoss)
    """Of a loss in chunks."""
    accumulate: AccumulateKernel = torch_accumulate
    dropout: DropoutKernel = torch_dropout
    experts: GroupedKernel = loop_product
    moe_elementwise: MoEElementwiseKernel = field(default_factory=TorchRows)
    """Of experts, around these products."""
    adam: AdamKernel = torch_adam
    compiler: Compiler | None = None
    """The compiler of the blocks, if there is one."""
    loss_chunk: int = 0
    """Tokens whose logits exist at a time; 0: all tokens of a micro-batch."""
    overlap: bool = True
    """Tensor-parallel collectives run beside weight gradients."""
    choices: Sequence[KernelChoice[Any]] = ()

    def banner(self) -> str:
        """One line: what is used for what, and why."""
        return "kernels: " + ", ".join(map(str, self.choices))

    def warnings(self) -> list[str]:
        """A line for each kernel that is installed and did not pass its check."""
        return [line for choice in self.choices for line in choice.warnings]
