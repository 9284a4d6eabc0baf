"""The kernels that the layers and the optimizer of a process use: one for each purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from megapipe.ops.adam import AdamKernel, torch_adam
from megapipe.ops.attention import AttentionKernel, Sdpa
from megapipe.ops.compiler import Compiler
from megapipe.ops.dropout import DropoutKernel, torch_dropout
from megapipe.ops.loss import LossKernel, TorchLoss
from megapipe.ops.moe.elementwise import MoEElementwiseKernel, TorchRows
from megapipe.ops.moe.grouped import GroupedKernel, loop_product
from megapipe.ops.norm import NormKernel, torch_norm
from megapipe.ops.packed_tile_kernels import PackedTileKernel
from megapipe.ops.probe import KernelChoice
from megapipe.ops.rotary import RotaryKernel, torch_rotate
from megapipe.ops.scores import ScoreModifiers
from megapipe.ops.swiglu import SwigluKernel, torch_swiglu
from megapipe.ops.tile_attention import TileKernel
from megapipe.ops.weight_grad import AccumulateKernel, torch_accumulate


class SplitAttention(Protocol):
    """Interface of attention in tiles, for context parallelism:
    :class:`megapipe.layers.context.ContextAttention`."""

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
        """Compute attention of this rank's positions of a micro-batch: q [s, b, heads, d], k and v
        [s, b, groups, d] -> [s, b, heads, d]."""


@dataclass(frozen=True)
class Kernels:
    """One kernel per purpose; torch's by default."""

    attention: AttentionKernel = field(default_factory=Sdpa)
    attention_tile: TileKernel | None = None
    """Kernel used instead of `attention` if positions are split over ranks or results are saved."""
    packed_attention_tile: PackedTileKernel | None = None
    """Kernel that computes many tiles in one call, if attention ends at document boundaries."""
    context: SplitAttention | None = None
    """Attention in tiles, which uses the two tile kernels."""
    norm: NormKernel = torch_norm
    head_norm: NormKernel = torch_norm
    """Kernel of the QK norm, a norm over each head of queries and keys."""
    rotary: RotaryKernel = torch_rotate
    swiglu: SwigluKernel = torch_swiglu
    loss: LossKernel = field(default_factory=TorchLoss)
    """Kernel of the loss that is computed in loss chunks."""
    accumulate: AccumulateKernel = torch_accumulate
    dropout: DropoutKernel = torch_dropout
    experts: GroupedKernel = loop_product
    moe_elementwise: MoEElementwiseKernel = field(default_factory=TorchRows)
    """Kernel of elementwise operations around the expert products."""
    adam: AdamKernel = torch_adam
    compiler: Compiler | None = None
    """Compiler of the blocks, if there is one."""
    loss_chunk: int = 0
    """Number of tokens whose logits exist at a time; 0: all tokens of a micro-batch."""
    overlap: bool = True
    """Whether tensor-parallel collectives overlap with weight gradients."""
    choices: Sequence[KernelChoice[Any]] = ()

    def banner(self) -> str:
        """Return one line: which kernel is used for which purpose, and why."""
        return "kernels: " + ", ".join(map(str, self.choices))

    def warnings(self) -> list[str]:
        """Return a line for each kernel that is installed but has failed its check."""
        return [line for choice in self.choices for line in choice.warnings]
