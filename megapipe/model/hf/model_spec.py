"""The spec of a model that is a class of transformers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from torch import nn

from megapipe.errors import ConfigError
from megapipe.layers.activation_policy import BlockSpan
from megapipe.layers.lora_specs import Lora
from megapipe.model.gpt.hf.config import config_from_hf
from megapipe.model.hf.experts import is_experts
from megapipe.model.hf.factory import UnitFactory
from megapipe.model.hf.features import ATTENDED, why_not
from megapipe.model.hf.lora import is_adapter
from megapipe.model.hf.source import ClassSource
from megapipe.model.hf.stage import ClassStage
from megapipe.model.interface import Feature, UniformRecompute, Work
from megapipe.model.kernel_needs import KernelNeeds
from megapipe.model.modules.model_spec import ModuleListSpec
from megapipe.model.modules.stage import ModuleStage
from megapipe.model.modules.units import ParameterPlace
from megapipe.model.partition import StageSpec
from megapipe.ops.scores import visible_scores
from megapipe.schedule.cost import Time
from megapipe.text import divisors_hint

if TYPE_CHECKING:
    from megapipe.model.interface import TensorShape


@dataclass(frozen=True)
class TransformersSpec(ModuleListSpec):
    """A class of transformers, cut into embedding, layers and head. Parameters have its names."""

    has_embedding_and_head = True

    @cached_property
    def _source(self) -> UnitFactory:
        source = ClassSource(self.source, tuple(self.options.items()), self.own_dtype)
        return _factory(source, source.fingerprint, self.conditions.lora)

    @property
    def fingerprint(self) -> str:
        return self._source.source.fingerprint

    @property
    def vocab_size(self) -> int:
        return self._source.source.vocab_size

    @property
    def layers(self) -> int:
        return len(self._source.outline.forms)

    def numbers(self, stage: StageSpec) -> Sequence[int]:
        inner = [layer + 1 for layer in stage.layers]
        return [*[0] * stage.embedding, *inner, *[self.layers + 1] * stage.head]

    @property
    def stage_class(self) -> type[ModuleStage]:
        return ClassStage

    @property
    def supports(self) -> tuple[Feature, ...]:
        found = (each for each in ATTENDED if not self.why_not(each))
        return (*super().supports, "full", "lora", *found)

    def why_not(self, feature: Feature) -> str:
        if feature not in ATTENDED:
            return ""
        source, length = self._source, self.conditions.sequence_length
        return why_not(feature, source.outline, source.calls, length)

    @property
    def kernel_needs(self) -> KernelNeeds:
        found = [each for each in self._source.outline.attention if each is not None]
        if not found:
            return KernelNeeds()
        widest, tp = max(found, key=lambda each: each.head_dim), self.conditions.tp
        modified = [each.scores for each in found if not each.scores.plain]
        return KernelNeeds(
            widest._replace(
                heads=widest.heads // tp,
                groups=max(1, widest.groups // tp),
                dropout=max(each.dropout for each in found),
                scores=modified[0] if modified else widest.scores,
            )
        )

    def unit_costs(self, repeated: UniformRecompute | None) -> Sequence[Time]:
        costs = [*super().unit_costs(repeated)]
        if repeated is not None and not repeated.stage and "block" in repeated.policy.recompute:
            costs[1:-1] = [cost * 4 / 3 for cost in costs[1:-1]]  # a forward more
        return costs

    def work(self, stage: StageSpec, spans: Sequence[BlockSpan], *, recompute: bool) -> Work:
        once = super().work(stage, spans, recompute=recompute)
        start = stage.layers.start
        for span in spans:
            if "block" in span.policy.recompute:
                own = StageSpec(False, range(start, start + span.blocks), False)
                forward = super().work(own, (), recompute=False).F
                once = once._replace(I=once.I + forward)
            start += span.blocks
        return once

    def places(self, layers: Mapping[int, nn.Module]) -> list[ParameterPlace]:
        def with_layout(place: ParameterPlace) -> ParameterPlace:
            frozen = self.conditions.lora is not None and not is_adapter(place.spec.name)
            over_ep = self.conditions.ep > 1 and is_experts(place.module)
            return place._replace(spec=replace(place.spec, frozen=frozen, over_ep=over_ep))

        return [*map(with_layout, super().places(layers))]

    def causal_flops(self, length: int) -> int:
        """Return the mean over layers of the forward's FLOPs on the first `length` tokens."""
        whole = self.conditions.sequence_length
        total = Fraction(0)
        for layer, own in zip(self._usual(1)[1:-1], self._source.outline.attention, strict=True):
            assert own is not None, "slices are supported"
            score = 4 * own.heads * own.head_dim
            linear = max(self._per_token(layer.flops) - score * whole, Fraction(0))
            total += linear * length + score * visible_scores(length, own.scores.window)
        return int(total / self.layers)

    def kind(self, layer: int) -> Hashable:
        return tuple(_traits(self._sketch[layer + 1]))

    def check(self) -> None:
        self._source.check()
        self._check_experts()
        super().check()

    def _check_experts(self) -> None:
        """Refuse a number of ranks that does not divide the experts."""
        ep, tp = self.conditions.ep, self.conditions.tp
        if ep == 1:
            return
        counts = [place.spec.shape[0] for place in self._parameter_places if place.spec.over_ep]
        if not counts:
            raise self._source.problem(
                f"parallel.ep={ep}: {self._source.class_name} has no experts that transformers' "
                "interface of experts computes; expected 1"
            )
        if tp > 1:
            raise self._source.problem(
                f"parallel.ep={ep} with parallel.tp={tp}: the experts of a class are split over ep "
                "alone; expected parallel.tp=1"
            )
        for count in counts:
            if count % ep:
                raise self._source.problem(
                    f"{count} experts are not divisible by parallel.ep={ep}: "
                    f"{divisors_hint('ep', count, ep)}"
                )

    def describe(self) -> str:
        name = self._source.class_name
        return f"{name} of transformers, {self.layers} layers, {self.dtype}; {self._advice()}"

    def _advice(self) -> str:
        """Return whether the built-in family has the model too, and what this route lacks."""
        lacks = "without sequence parallelism and fused kernels"
        try:
            config_from_hf(self._source.source.config)
        except ConfigError:
            return lacks
        return f"{lacks}, which the built-in family has (convert inspect --config)"

    def _check_logits(self, output: Sequence[TensorShape]) -> None:
        """Accept any width: the class decides it."""


@lru_cache(maxsize=4)
def _factory(source: ClassSource, fingerprint: str, lora: Lora | None) -> UnitFactory:
    """Return the factory of a source with this fingerprint. Specs of one run share it, since it
    takes seconds."""
    return UnitFactory(source, lora)


def _traits(module: nn.Module) -> Iterator[Any]:
    """Yield what layers that differ only in the values of their weights have in common."""
    for path, each in module.named_modules():
        yield path, type(each).__name__
        for name, tensor in (*each._parameters.items(), *each._buffers.items()):
            yield name, None if tensor is None else tuple(tensor.shape)
        for name, value in sorted(vars(each).items()):
            plain = isinstance(value, (str, int, float, bool, type(None)))
            if plain and name not in ("layer_idx", "number", "outside"):
                yield name, value
