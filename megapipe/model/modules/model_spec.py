"""The spec of a model that is a list of user-defined modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megapipe.layers.activation_policy import BlockSpan
from megapipe.layers.specs import ParameterSpec
from megapipe.model.interface import (
    Feature,
    Loss,
    ModelSpec,
    RunShape,
    TensorShape,
    UniformRecompute,
    Work,
)
from megapipe.model.partition import StageSpec
from megapipe.model.user_loss import load_loss
from megapipe.schedule.cost import Time
from megapipe.util.dtypes import Dtype

if TYPE_CHECKING:
    from torch import nn
    from torch.nn import Parameter

    from megapipe.layers.parameter import Sharding
    from megapipe.model.modules.measure import Measured
    from megapipe.model.modules.stage import ModuleStage
    from megapipe.model.modules.units import LayerSource, ParameterPlace

STAND_IN = 257
"""Vocabulary size with which layers are measured before the tokenizer is known."""


@dataclass(frozen=True)
class ModuleListSpec(ModelSpec):
    """A model whose layers a user-defined function returns. Their parameters and outputs are found
    on the meta device."""

    name = "model.source"
    has_embedding_and_head = False

    source: str
    options: Mapping[str, Any]
    own_dtype: Dtype
    vocabulary: int | None
    conditions: RunShape

    @property
    def dtype(self) -> Dtype:
        return self.own_dtype

    @property
    def vocab_size(self) -> int | None:
        return self.vocabulary

    @property
    def layers(self) -> int:
        return len(self._sketch)

    @property
    def stage_class(self) -> type[ModuleStage]:
        """Class of the stages."""
        from megapipe.model.modules.stage import ModuleStage

        return ModuleStage

    def numbers(self, stage: StageSpec) -> Sequence[int]:
        """Return the numbers of a stage's modules in the list."""
        return stage.layers

    @property
    def supports(self) -> tuple[Feature, ...]:
        split = any(place.spec.split for place in self._parameter_places)
        return ("tp",) if split else ()

    @cached_property
    def _source(self) -> LayerSource:
        from megapipe.model.modules.units import ModelFactory

        return ModelFactory(
            self.source,
            {
                "vocab_size": self.vocabulary or STAND_IN,
                "sequence_length": self.conditions.sequence_length,
                **self.options,
            },
        )

    @cached_property
    def _sketch(self) -> Sequence[nn.Module]:
        return self._source.sketch()

    @cached_property
    def _parameter_places(self) -> Sequence[ParameterPlace]:
        """Every parameter of the model (without values) and the module that has it."""
        found = self.places(dict(enumerate(self._sketch)))
        for place in found:
            parameter = place.module._parameters[place.attribute]
            assert parameter is not None
            parameter.requires_grad_(not place.spec.frozen)
        return found

    def places(self, layers: Mapping[int, nn.Module]) -> list[ParameterPlace]:
        """Return every parameter of some layers and the module that has it."""
        from megapipe.model.modules.units import parameter_places

        return [*parameter_places(layers, len(self._sketch) - 1, self._source)]

    @cached_property
    def _measured(self) -> dict[tuple[int, int, int], list[Measured]]:
        return {}

    def measured(self, rows: int, length: int, tp: int) -> list[Measured]:
        """Measure each layer on one of `tp` ranks, for `rows` sequences of `length` tokens."""
        from megapipe.layers.user_linear import Linear
        from megapipe.model.modules.measure import measure

        if (rows, length, tp) not in self._measured:
            deferred = [p for p in self._parameter_places if not p.spec.grad_by_autograd]
            self._measured[rows, length, tp] = measure(
                self._source,
                self._sketch,
                {place.module for place in deferred if isinstance(place.module, Linear)},
                self._partial,
                self._loss,
                (rows, length),
                self.dtype,
                tp,
            )
        return self._measured[rows, length, tp]

    @property
    def _partial(self) -> Sequence[Parameter]:
        """The parameters between split layers whose gradients are summed over tp."""
        places = (place for place in self._parameter_places if place.spec.heads_partial)
        found = (place.module._parameters[place.attribute] for place in places)
        return [each for each in found if each is not None]

    def _usual(self, tp: int) -> list[Measured]:
        """Measure each layer for a whole micro-batch of whole sequences, on one of `tp` ranks."""
        return self.measured(self.conditions.microbatch, self.conditions.sequence_length, tp)

    @property
    def _loss(self) -> Loss:
        from megapipe.model.modules.stage import cross_entropy

        return load_loss(self.conditions) or cross_entropy

    def _per_token(self, flops: int) -> Fraction:
        return Fraction(flops, self.conditions.microbatch * self.conditions.sequence_length)

    def check(self) -> None:
        """Raise :class:`ConfigError` for layers that fail, that tp does not divide, or that pass no
        gradient."""
        tp = self.conditions.tp
        for place in self._parameter_places:
            dim = place.spec.split_dim
            if dim is not None and place.spec.shape[dim] % tp:
                raise self._source.problem(
                    f"{place.spec.name} has {place.spec.shape[dim]} "
                    f"{'rows' if dim == 0 else 'columns'}, which parallel.tp={tp} does not divide"
                )
        self._check_linears()
        *inner, last = self._usual(tp)
        for number, layer in enumerate(inner):
            if not any(each.has_grad for each in layer.output):
                raise self._source.problem(
                    f"{self._source.label(number)} returns only integers, so no gradient flows "
                    "through it: expected floating-point values"
                )
        if self.conditions.loss is None:
            self._check_logits(last.output)

    def _check_linears(self) -> None:
        """Refuse megapipe's linear layers with other parameters than weight and bias."""
        from megapipe.layers.user_linear import Linear

        for number, layer in enumerate(self._sketch):
            for path, module in layer.named_modules():
                extra = set(module._parameters) - {"weight", "bias"}
                if isinstance(module, Linear) and (extra or "weight" not in module._parameters):
                    raise self._source.problem(
                        f"{self._source.module_name(number, layer, path)} is a "
                        f"{type(module).__name__} with parameters other than weight and bias: "
                        "expected nn.Linear in its place"
                    )

    def _check_logits(self, output: Sequence[TensorShape]) -> None:
        rows, length = self.conditions.microbatch, self.conditions.sequence_length
        wanted = (rows, length, self.vocabulary or STAND_IN)
        shapes = [each.shape for each in output]
        fits = len(shapes) == 1 and len(shapes[0]) == 3 and shapes[0][:2] == wanted[:2]
        if not fits or shapes[0][2] < wanted[2]:
            raise self._source.problem(
                f"the last layer returns {shapes}, and the loss needs "
                f"logits of shape {wanted}: [samples, tokens, vocabulary] (or set "
                "train.loss_function)"
            )

    def parameters(self, stage: StageSpec) -> Iterator[ParameterSpec]:
        numbers = self.numbers(stage)
        return (place.spec for place in self._parameter_places if place.layer in numbers)

    def describe(self) -> str:
        return f"{self.layers} layers of {self.source}, {self.dtype}"

    def unit_costs(self, repeated: UniformRecompute | None) -> Sequence[Time]:
        times = 2 if repeated is not None and repeated.stage else 1
        layers = self._usual(self.conditions.tp)
        return [self._per_token(times * layer.flops + layer.backward) for layer in layers]

    def work(self, stage: StageSpec, spans: Sequence[BlockSpan], *, recompute: bool) -> Work:
        tp = self.conditions.tp
        own = [self._usual(tp)[number] for number in self.numbers(stage)]
        flops = tp * self._per_token(sum(layer.flops for layer in own))
        backward = tp * self._per_token(sum(layer.backward for layer in own))
        deferred = tp * self._per_token(sum(layer.deferred for layer in own))
        return Work(F=flops, I=backward - deferred, W=deferred, R=recompute * flops)

    def token_flops(self) -> float:
        layers = self._usual(1)
        return float(sum(self._per_token(layer.flops + layer.backward) for layer in layers))

    def reference_layer_flops(self) -> Time:
        return self.forward_flops(self.whole) / self.layers or 1

    def forward_flops(self, stage: StageSpec) -> float:
        measured = self._usual(1)
        return float(sum(self._per_token(measured[n].flops) for n in self.numbers(stage)))

    def output_shape(self, stage: StageSpec, rows: int, length: int) -> tuple[TensorShape, ...]:
        return self.measured(rows, length, self.conditions.tp)[self.numbers(stage)[-1]].output

    def build(self, stage: StageSpec, sharding: Sharding) -> ModuleStage:
        """Build a stage. Its parameters have initial values, but no storage in buckets yet. Buffers
        keep their number types: rotary angles, for example, need more digits than weights. If
        torch's default device is the meta device, no tensor has values."""
        import torch

        wanted, last = self.numbers(stage), len(self._sketch) - 1
        ends = {0, last}
        shared = any(place.spec.tied for place in self._parameter_places)
        needed = {*wanted} | (ends if shared and ends & {*wanted} else set())
        if torch.get_default_device().type == "meta":
            made = dict(enumerate(deepcopy(list(self._sketch))))
            for layer in made.values():
                layer.requires_grad_(True)
        else:
            made = self._source.make(self.conditions.seed, needed)
        layers = {number: made[number] for number in wanted}
        found = [place for place in self.places(made) if place.layer in wanted]
        if [p.spec for p in found] != list(self.parameters(stage)):
            raise self._source.problem(
                "its layers have other parameters than on the meta device: expected the same "
                "layers whenever they are made, and a parameter that two of them share to be made "
                "once"
            )
        return self.stage_class(
            layers,
            found,
            sharding,
            first=0 in wanted,
            last=last in wanted,
            loss=self._loss,
        )
