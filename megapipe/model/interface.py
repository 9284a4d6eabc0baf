"""The interface of models: a :class:`ModelSpec` describes a model and builds its stages.

A model is a chain of layers, for some models with an embedding before and a head after them. Each
of these is a *unit*; the chain is cut into stages (:mod:`megapipe.model.partition`). The partition,
the plan, the optimizer's buckets, checkpoints and the engine use only :class:`ModelSpec` and
:class:`StageModule`. A feature that a model lacks is refused by name.

This module needs no torch; a model needs torch only to build a stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self

from megapipe.layers.activation_policy import BlockPolicy, BlockSpan
from megapipe.layers.lora_specs import Lora
from megapipe.layers.specs import ParameterSpec, by_name
from megapipe.model.kernel_needs import KernelNeeds
from megapipe.model.partition import StageSpec
from megapipe.schedule.cost import Time
from megapipe.util.dtypes import DTYPE_BYTES, Dtype

if TYPE_CHECKING:
    from torch import Tensor, device

    from megapipe.context.split import LocalPositions
    from megapipe.layers.kv_cache import KVCache
    from megapipe.layers.microbatch import MicroBatch
    from megapipe.layers.parameter import Sharding
    from megapipe.layers.weight_grad import WeightGradQueue


@dataclass(frozen=True)
class RunShape:
    """Sizes and settings of a run on which its model spec depends."""

    sequence_length: int
    microbatch: int
    """Number of samples in a whole micro-batch."""
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    cuda: bool = False
    loss_chunk: int = 0
    """Maximum number of tokens whose logits are in memory at a time (loss chunk); 0: no limit."""
    ep: int = 1
    etp: int = 1
    pad_to_capacity: bool = False
    """Value of ``experts.pad_to_capacity``: whether each expert's rows are padded to capacity."""
    compile: bool = False
    loss: str | None = None
    """Value of ``train.loss_function``: a user-defined loss as ``module:name``, or None."""
    seed: int = 0
    """Value of ``run.seed``, for initial weights that user-defined modules draw."""
    lora: Lora | None = None
    """Adapters that are trained instead of the weights."""


class Work(NamedTuple):
    """FLOPs per token of a stage's operations F, I, W, R, summed over tensor-parallel ranks."""

    F: Time
    I: Time  # noqa: E741
    W: Time
    R: Time
    """FLOPs of R: the stage's forward if it is recomputed as a whole; otherwise 0."""


class UniformRecompute(NamedTuple):
    """Recomputation settings that hold for every layer of the model."""

    policy: BlockPolicy
    span: int
    """Number of layers that are recomputed together."""
    stage: bool
    """Whether whole stages are recomputed instead of layers."""


class TensorShape(NamedTuple):
    """Shape and type of one tensor of a message between stages."""

    shape: tuple[int, ...]
    dtype: str
    """Type of the tensor by torch's name, e.g. float32."""
    bytes: int
    has_grad: bool = True
    """Whether the next stage sends a gradient back for the tensor."""


Feature = Literal[
    "tp",
    "sequence_parallel",
    "slices",
    "selective",
    "full",
    "offload",
    "compile",
    "document_mask",
    "loss_chunk",
    "kv_cache",
    "lora",
    "context",
]
"""A feature that a model may support, e.g. recomputation of modules (selective) or of whole layers
(full), offload of activations to host memory, attention only within documents (document_mask), a
key/value cache for generation (kv_cache)."""


class ModelSpec(ABC):
    """A model of resolved sizes, as one run uses it."""

    name: ClassVar[str]
    has_embedding_and_head: ClassVar[bool]
    """Whether the model has an embedding before its layers and a head after them."""
    conditions: RunShape

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        dtype: Dtype,
        vocab_size: int | None,
        conditions: RunShape,
    ) -> Self:
        """Make the spec of a user-defined model from ``model.options``; raises ConfigError."""
        raise NotImplementedError(f"{cls.__name__} cannot be made from options")

    # what it is

    @property
    @abstractmethod
    def supports(self) -> Collection[Feature]:
        """Features that the model supports."""

    def why_not(self, feature: Feature) -> str:
        """Say why the model does not support a feature, "" if there is no more to say."""
        return ""

    @property
    @abstractmethod
    def dtype(self) -> Dtype:
        """Number type of weights and of messages between stages."""

    @property
    @abstractmethod
    def vocab_size(self) -> int | None:
        """Number of token ids; None: the tokenizer decides."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """Number of layers, without embedding and head."""

    @abstractmethod
    def check(self) -> None:
        """Raise :class:`ConfigError` if the model's sizes do not fit each other or the run."""

    @abstractmethod
    def parameters(self, stage: StageSpec) -> Iterator[ParameterSpec]:
        """Yield the parameters of a stage in the order of the forward.

        A tied parameter is yielded once per use.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return the model's sizes in a few words."""

    def contents(self, stage: StageSpec) -> str:
        """Say in words which layers a stage has, and whether it has embedding and head."""
        layers = stage.layers
        parts = ["embedding"] if stage.embedding else []
        if len(layers) == 1:
            parts.append(f"layer {layers[0]}")
        elif layers:
            parts.append(f"layers {layers[0]}-{layers[-1]}")
        if stage.head:
            parts.append("head")
        return ", ".join(parts)

    @property
    def whole(self) -> StageSpec:
        """The whole model as one stage."""
        return StageSpec(
            self.has_embedding_and_head, range(self.layers), self.has_embedding_and_head
        )

    def splits_logits(self, stage: StageSpec) -> bool:
        """Whether a stage's logits are split by columns over tensor-parallel ranks."""
        return any(spec.role == "head" and spec.split for spec in self.parameters(stage))

    def shapes(
        self, stage: StageSpec | None = None, *, trained: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """Return the global shapes of a stage's parameters by name, by default of the whole model;
        with `trained`, frozen parameters are left out.

        A head that is tied to an embedding on another stage has a replica of the matrix.
        """
        named = by_name(self.parameters(stage or self.whole))
        return {name: s.shape for name, s in named.items() if not (trained and s.frozen)}

    def num_parameters(self, stage: StageSpec | None = None, *, trained: bool = False) -> int:
        """Return the number of parameters of a stage, by default of the whole model."""
        return sum(map(prod, self.shapes(stage, trained=trained).values()))

    def buffers(self) -> Mapping[str, tuple[int, ...]]:
        """Return the global shapes of buffers that are saved with the weights, by checkpoint name.
        Their number type is that of main gradients."""
        return {}

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Return the global shapes of parameters and buffers by checkpoint name."""
        return {f"model/{n}": shape for n, shape in self.shapes().items()} | {**self.buffers()}

    def experts(self) -> Mapping[int, int]:
        """Return the number of experts of each MoE layer, by layer."""
        return {}

    def routing_stat_counts(self) -> Mapping[int, int]:
        """Return the number of routing statistics that each MoE layer reports per step."""
        return {}

    @property
    def fingerprint(self) -> str:
        """Text that differs for models that the section `model` does not tell apart."""
        return ""

    def kind(self, layer: int) -> Hashable:
        """Return a key that is equal for layers that differ only in the values of their weights."""
        return layer

    def active_parameters(self) -> int:
        """Return the number of parameters that one token uses; only its top-k experts count."""
        return self.num_parameters()

    # what it costs

    @abstractmethod
    def unit_costs(self, repeated: UniformRecompute | None) -> Sequence[Time]:
        """Return the FLOPs per token, forward plus backward, of each unit of the model.

        `repeated`: recomputation, if every layer has the same; None if it depends on the stage
        layout, which is not known yet.
        """

    @abstractmethod
    def work(self, stage: StageSpec, spans: Sequence[BlockSpan], *, recompute: bool) -> Work:
        """Return FLOPs per token of a stage. `spans`: recomputation of its layers; `recompute`:
        whether the whole stage is recomputed."""

    @abstractmethod
    def reference_layer_flops(self) -> Time:
        """Return FLOPs per token of one layer's forward, the unit in which costs are printed."""

    @abstractmethod
    def forward_flops(self, stage: StageSpec) -> float:
        """Return the FLOPs per token that a stage's forward needs without padding."""

    def token_flops(self) -> float:
        """Return FLOPs of training on one token; the backward takes twice the forward's FLOPs."""
        return 3 * self.forward_flops(self.whole)

    def causal_flops(self, length: int) -> int:
        """Return FLOPs of one layer's forward on the first `length` tokens of a sequence under a
        causal mask. A model with the feature slices has to implement it."""
        raise NotImplementedError(f"{self.name} does not support slices")

    # what it holds and sends

    @abstractmethod
    def output_shape(self, stage: StageSpec, rows: int, length: int) -> tuple[TensorShape, ...]:
        """Return the tensors that a stage sends to the next one, on one tensor-parallel rank.

        The message is for `rows` sequences of `length` tokens.
        """

    # how it is built

    @property
    def kernel_needs(self) -> KernelNeeds:
        """Kernels that the model's stages call."""
        return KernelNeeds()

    @abstractmethod
    def build(self, stage: StageSpec, sharding: Sharding) -> StageModule:
        """Build a stage whose parameters have no storage yet."""

    def check_compiled(
        self,
        sharding: Sharding,
        *,
        rows: Collection[int],
        recompute: bool,
        documents: bool,
        device: device,
        local_positions: LocalPositions | None = None,
    ) -> None:
        """Compare compiled layers with uncompiled ones; raise :class:`ConfigError` if they differ.

        `rows`: the numbers of sequences per micro-batch to check. `recompute`: whether a recomputed
        forward is checked too. `documents`: whether attention gets a document mask.
        `local_positions`: this rank's positions, if cp splits sequences.
        """
        raise NotImplementedError(f"{self.name} does not support torch.compile")


Loss = Callable[[Any, "Tensor", "Tensor"], "Tensor"]
"""Function (output of the last layer, labels [b, s], mask [b, s]) -> sum of unmasked losses, []."""

Message = Any
"""Output of a stage, or the gradient of an output: a tensor, or a tuple of tensors."""


class StageModule(Protocol):
    """A stage as the engine runs it: an ``nn.Module`` whose parameters carry their specs."""

    is_first: bool
    """Whether the stage takes the tokens of a micro-batch."""
    is_last: bool
    """Whether the stage computes the loss."""
    queue: WeightGradQueue
    """Queue of weight gradients that the stage's layers defer to W."""
    training: bool

    def set_policies(self, spans: Sequence[BlockSpan]) -> None:
        """Set what the layers recompute and offload; `spans` cover all layers in order."""

    def __call__(
        self, x: Message, mb: MicroBatch, cache: KVCache | None = None, *, skip_output: bool = False
    ) -> Message:
        """Run the stage: its input (None at the first stage) -> its output, or at the last stage
        the sum of unmasked token losses in nats, []. With `skip_output` the output may have a graph
        but no values."""

    def logits(
        self, x: Message, mb: MicroBatch, cache: KVCache | None = None, *, last: bool = False
    ) -> Tensor:
        """Return the last stage's logits [s, b, V/tp]; with `last` only at the last position."""

    def train(self, mode: bool = True) -> Any: ...

    def to(self, device: device) -> Any: ...

    def parameters(self, recurse: bool = True) -> Iterator[Any]: ...

    def modules(self) -> Iterator[Any]: ...


def bytes_of(tensors: Sequence[TensorShape]) -> int:
    """Return the size in bytes of a message that consists of `tensors`."""
    return sum(each.bytes for each in tensors)


def main_tensor(shape: tuple[int, ...], dtype: Dtype) -> TensorShape:
    """Describe a tensor of a message that has the model's number type."""
    return TensorShape(shape, TORCH_NAMES[dtype], prod(shape) * DTYPE_BYTES[dtype])


TORCH_NAMES: dict[Dtype, str] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
}
