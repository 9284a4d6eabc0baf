"""The interface of models: a *family* describes a model, and builds stages that the engine runs.

A model is a chain of units that is cut into stages: layers, and where the family has them an
embedding before and a head after these (:mod:`megapipe.model.partition`). The partition, the plan,
the buckets of the optimizer, checkpoints and the engine read :class:`ModelSpec` and
:class:`StageModule` alone; a feature that a family lacks is refused by name.

Nothing here needs torch, and a family needs it only to build a stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self

from megapipe.layers.lora_specs import Lora
from megapipe.layers.policy import BlockPolicy, BlockSpan
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
    """How a run uses a model."""

    sequence_length: int
    microbatch: int
    """Samples of a whole micro-batch."""
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    cuda: bool = False
    loss_chunk: int = 0
    """Most tokens whose logits there are at a time; 0: all of them."""
    ep: int = 1
    etp: int = 1
    pad_to_capacity: bool = False
    """``experts.pad``: whether experts have room for all rows that there can be."""
    compile: bool = False
    loss: str | None = None
    """``train.loss``, a loss of the user's."""
    seed: int = 0
    """``run.seed``, for initial weights that the modules themselves draw."""
    lora: Lora | None = None
    """Adapters that are trained in place of the weights."""


class Work(NamedTuple):
    """FLOPs per token of one stage, on all tensor-parallel ranks together."""

    F: Time
    I: Time  # noqa: E741
    W: Time
    R: Time
    """Of the recomputation, where the stage recomputes as a whole; otherwise 0."""


class UniformRecompute(NamedTuple):
    """The recomputation policy of all layers, where they have the same."""

    policy: BlockPolicy
    span: int
    """Layers that are run again together."""
    stage: bool
    """Whole stages are run again instead."""


class TensorShape(NamedTuple):
    """A tensor of a message."""

    shape: tuple[int, ...]
    dtype: str
    """Torch's name, such as float32."""
    bytes: int
    has_grad: bool = True
    """Its gradient comes back."""


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
"""Features that a family may support. Recomputation is of modules (selective) or of whole layers
(full), activations go to host memory (offload), attention ends at documents (document_mask), and a
key/value cache is for generation."""


class ModelSpec(ABC):
    """A model of resolved sizes under the conditions of a run."""

    name: ClassVar[str]
    has_embedding_and_head: ClassVar[bool]
    """Whether an embedding comes before its layers and a head after them."""
    conditions: RunShape

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        dtype: Dtype,
        vocab_size: int | None,
        conditions: RunShape,
    ) -> Self:
        """Make a family that ``model.source`` names, from ``model.options``; raises ConfigError."""
        raise NotImplementedError(f"{cls.__name__} is not made from options")

    # what it is

    @property
    @abstractmethod
    def supports(self) -> Collection[Feature]:
        """The features that it has."""

    @property
    @abstractmethod
    def dtype(self) -> Dtype:
        """The type of weights and messages."""

    @property
    @abstractmethod
    def vocab_size(self) -> int | None:
        """Number of token ids; None where the tokenizer has to say."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """Number of layers in the chain."""

    @abstractmethod
    def check(self) -> None:
        """Raise :class:`ConfigError` for sizes that do not fit each other or the conditions."""

    @abstractmethod
    def parameters(self, stage: StageSpec) -> Iterator[ParameterSpec]:
        """The parameters of a stage in the order of the forward, a tied one once for each use."""

    @abstractmethod
    def describe(self) -> str:
        """Its sizes in a few words."""

    def contents(self, stage: StageSpec) -> str:
        """The units of a stage in words."""
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
        """All units, as one stage."""
        return StageSpec(
            self.has_embedding_and_head, range(self.layers), self.has_embedding_and_head
        )

    def splits_logits(self, stage: StageSpec) -> bool:
        """Whether tensor-parallel ranks have different columns of the logits of a stage."""
        return any(spec.role == "head" and spec.split for spec in self.parameters(stage))

    def shapes(
        self, stage: StageSpec | None = None, *, trained: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """Global shape of every parameter of a stage, by default of the model, by name; with
        `trained` of those that are not frozen.

        A head tied to an embedding on another stage holds a copy of that matrix.
        """
        named = by_name(self.parameters(stage or self.whole))
        return {name: s.shape for name, s in named.items() if not (trained and s.frozen)}

    def num_parameters(self, stage: StageSpec | None = None, *, trained: bool = False) -> int:
        """Number of parameters of a stage, by default of the model."""
        return sum(map(prod, self.shapes(stage, trained=trained).values()))

    def buffers(self) -> Mapping[str, tuple[int, ...]]:
        """Global shapes of what belongs to the weights and is no parameter, by the names that
        checkpoints have for them; of the type of main gradients."""
        return {}

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of all that belongs to the weights, by the names in checkpoints."""
        return {f"model/{n}": shape for n, shape in self.shapes().items()} | {**self.buffers()}

    def experts(self) -> Mapping[int, int]:
        """How many experts there are in each layer that has some."""
        return {}

    def routing_stat_counts(self) -> Mapping[int, int]:
        """How many numbers each of these layers tells of its routing in a step."""
        return {}

    def kind(self, layer: int) -> Hashable:
        """Equal for layers that differ in the values of their weights alone."""
        return layer

    def active_parameters(self) -> int:
        """Number of parameters that one token meets; fewer than all where layers have experts."""
        return self.num_parameters()

    # what it costs

    @abstractmethod
    def unit_costs(self, repeated: UniformRecompute | None) -> Sequence[Time]:
        """FLOPs per token, forward and backward, of every unit of the chain. `repeated` is the
        policy of all layers; None where it depends on the stages, which are not known yet."""

    @abstractmethod
    def work(self, stage: StageSpec, spans: Sequence[BlockSpan], *, again: bool) -> Work:
        """FLOPs per token of a stage whose layers recompute as `spans` say; with `again` the whole
        stage recomputes."""

    @abstractmethod
    def reference_layer_flops(self) -> Time:
        """FLOPs per token of the forward of a layer, by which costs are shown."""

    @abstractmethod
    def forward_flops(self, stage: StageSpec) -> float:
        """FLOPs per token of a stage's forward that the mathematics needs, without padding."""

    def token_flops(self) -> float:
        """FLOPs of training on one token: forward, and twice as many backward."""
        return 3 * self.forward_flops(self.whole)

    def causal_flops(self, length: int) -> int:
        """FLOPs of one layer's forward on the first `length` tokens of a sequence, of which each
        attends to itself and those before it; for slices."""
        raise NotImplementedError(f"{self.name} does not support slices")

    # what it holds and sends

    @abstractmethod
    def output_shape(self, stage: StageSpec, rows: int, length: int) -> tuple[TensorShape, ...]:
        """The output of a stage that is not the last, as one tensor-parallel rank has it."""

    # how it is built

    @property
    def kernel_needs(self) -> KernelNeeds:
        """The kernels that its stages call."""
        return KernelNeeds()

    @abstractmethod
    def build(self, stage: StageSpec, sharding: Sharding) -> StageModule:
        """A stage whose parameters have no storage yet."""

    def check_compiled(
        self,
        sharding: Sharding,
        *,
        rows: Collection[int],
        again: bool,
        documents: bool,
        device: device,
        held: LocalPositions | None = None,
    ) -> None:
        """Compare compiled layers with uncompiled ones; :class:`ConfigError` where they differ.
        `held` are the positions that are here, where they are split over ranks."""
        raise NotImplementedError(f"{self.name} does not support torch.compile")


Loss = Callable[[Any, "Tensor", "Tensor"], "Tensor"]
"""(the last layer's output, labels [b, s], mask [b, s]) -> the sum of the unmasked losses, []."""

Message = Any
"""The output of a stage, or its gradient: a tensor, or a tuple of tensors."""


class StageModule(Protocol):
    """A stage as the engine runs it: an ``nn.Module`` whose parameters carry their specs."""

    is_first: bool
    """It takes the tokens of the micro-batch."""
    is_last: bool
    """It computes the loss."""
    queue: WeightGradQueue
    """Where its layers leave their weight gradients."""
    training: bool

    def set_policies(self, spans: Sequence[BlockSpan]) -> None:
        """Set which activations the layers keep: `spans` cover all layers in order."""

    def __call__(
        self, x: Message, mb: MicroBatch, cache: KVCache | None = None, *, graph_only: bool = False
    ) -> Message:
        """Run the stage: its input (None at the first stage) -> its output or, at the last stage,
        the sum of the unmasked token losses in nats, []. With `graph_only` the output that is
        passed on may have a graph but no values."""

    def logits(
        self, x: Message, mb: MicroBatch, cache: KVCache | None = None, *, last: bool = False
    ) -> Tensor:
        """The last stage's logits [s, b, V/tp]; with `last` of the last position alone."""

    def train(self, mode: bool = True) -> Any: ...

    def to(self, device: device) -> Any: ...

    def parameters(self, recurse: bool = True) -> Iterator[Any]: ...

    def modules(self) -> Iterator[Any]: ...


def bytes_of(tensors: Sequence[TensorShape]) -> int:
    """Bytes of a message."""
    return sum(each.bytes for each in tensors)


def main_tensor(shape: tuple[int, ...], dtype: Dtype) -> TensorShape:
    """A tensor of the model's own type."""
    return TensorShape(shape, TORCH_NAMES[dtype], prod(shape) * DTYPE_BYTES[dtype])


TORCH_NAMES: dict[Dtype, str] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
}
