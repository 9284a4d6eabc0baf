"""A stage made of user-defined layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from megapipe.layers.activation_policy import BlockSpan
from megapipe.layers.dropout import dropout_seed
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe.sharding import parameter_of
from megapipe.layers.parameter import Sharding
from megapipe.layers.rng import seeded
from megapipe.layers.specs import ParameterSpec
from megapipe.layers.user_linear import Linear
from megapipe.model.interface import Loss
from megapipe.model.modules.units import ParameterPlace


def cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of unmasked token losses in nats, []; logits [..., V], labels and mask [...].

    The losses are computed in fp32 (fp64 for fp64 models).
    """
    if logits.element_size() < 4:
        logits = logits.float()
    losses = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum()


class ModuleStage(nn.Module):
    """A stage of user-defined layers: tokens or message -> message or, at the end, sum of losses.

    A tuple that a layer returns becomes the arguments of the next layer. Random numbers are seeded
    by step, micro-batch and layer, so a recomputed forward draws the same numbers.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        places: Sequence[ParameterPlace],
        sharding: Sharding,
        *,
        first: bool,
        last: bool,
        loss: Loss = cross_entropy,
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = first, last
        self.queue = sharding.queue
        self.sharding = sharding
        self.loss = loss
        self.frozen = any(place.spec.frozen for place in places)
        self.layers = nn.ModuleDict({str(number): layer for number, layer in layers.items()})
        deferred: dict[Linear, dict[str, ParameterSpec]] = {}
        for place in places:
            if isinstance(place.module, Linear) and not place.spec.grad_by_autograd:
                deferred.setdefault(place.module, {})[place.attribute] = place.spec
            else:
                parameter = parameter_of(sharding, place.spec)
                place.module._parameters[place.attribute] = parameter
        for module, specs in deferred.items():
            module.bind(sharding, specs["weight"], specs.get("bias"))

    def set_policies(self, spans: Sequence[BlockSpan]) -> None:
        """Accept spans without recomputation or offload: layers save what autograd saves."""
        assert not any(span.policy.recompute or span.policy.offload for span in spans)

    def forward(
        self,
        x: Any,
        mb: MicroBatch,
        cache: KVCache | None = None,
        *,
        skip_output: bool = False,
    ) -> Any:
        """Return the output, or at the last stage the loss; `skip_output` changes nothing."""
        y = self.outputs(x, mb, cache)
        if not self.is_last:
            return y
        assert mb.labels is not None
        assert mb.mask is not None
        return self.loss(y, mb.labels, mb.mask != 0)

    def outputs(self, x: Any, mb: MicroBatch, cache: KVCache | None = None) -> Any:
        """Return the output of this stage's last layer, a tensor or a tuple."""
        return _view(self.run(mb.tokens if self.is_first else x, mb, cache))

    def run(self, y: Any, mb: MicroBatch, cache: KVCache | None = None) -> Any:
        """Run the layers one after the other, from the input `y` of the first."""
        return self.run_layers(map(int, self.layers), y, mb, cache)

    def run_layers(
        self, numbers: Iterable[int], y: Any, mb: MicroBatch, cache: KVCache | None = None
    ) -> Any:
        """Run some layers, by their numbers, from the input `y` of the first of them."""
        for number in numbers:
            inputs = y if isinstance(y, tuple) else (y,)
            with seeded(inputs[0].device, dropout_seed(mb, "layer", number, 0)):
                y = self.run_layer(self.layers[str(number)], inputs, mb, cache)
        return y

    def run_layer(
        self, layer: nn.Module, inputs: tuple[Any, ...], mb: MicroBatch, cache: KVCache | None
    ) -> Any:
        """Run one layer. User-defined layers know nothing of micro-batches and caches."""
        assert cache is None, "user-defined layers have no key-value cache"
        return layer(*inputs)

    def logits(
        self, x: Any, mb: MicroBatch, cache: KVCache | None = None, *, last: bool = False
    ) -> Tensor:
        """Return the logits, [s, b, V], with `last` only at the last position, [1, b, V]."""
        logits: Tensor = self.outputs(x, mb, cache).transpose(0, 1)
        return logits[-1:] if last else logits


def _view(y: Any) -> Any:
    """Return the tensors as new autograd nodes, even tensors that a layer passed through."""
    if isinstance(y, tuple):
        return tuple(_view(each) for each in y)
    return y.view_as(y)
