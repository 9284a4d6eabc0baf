"""The spec of the built-in model; GPT-2, GPT-3 and Llama are settings of it.

Modules that only a plan or only a run needs are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, get_args

from megapipe.config.model import ModelConfig
from megapipe.context.split import LocalPositions
from megapipe.layers.activation_policy import BlockSpan
from megapipe.layers.moe.specs import padded_rows
from megapipe.layers.specs import ParameterSpec
from megapipe.model.gpt import checks
from megapipe.model.gpt.flops import causal_flops, head_flops, layer_flops
from megapipe.model.gpt.lora import adapter_flops, with_adapters
from megapipe.model.gpt.moe.layers import routing_of, row_widths, unused_parameters
from megapipe.model.gpt.parameters import buffers, known, stage_parameters
from megapipe.model.gpt.scores import scores_of
from megapipe.model.gpt.work import Once, part_costs, stage_work
from megapipe.model.interface import (
    Feature,
    ModelSpec,
    RunShape,
    TensorShape,
    UniformRecompute,
    Work,
    main_tensor,
)
from megapipe.model.kernel_needs import AttentionNeeds, KernelNeeds, NormNeeds
from megapipe.model.partition import StageSpec
from megapipe.model.user_loss import load_loss
from megapipe.schedule.cost import Time
from megapipe.text import count_noun, join_or
from megapipe.util.dtypes import Dtype

if TYPE_CHECKING:
    from torch import device

    from megapipe.layers.parameter import Sharding
    from megapipe.model.gpt.stage import GPTStage


@dataclass(frozen=True)
class GPTSpec(ModelSpec):
    """A GPT-style decoder of resolved sizes, which supports every feature."""

    model: ModelConfig
    conditions: RunShape

    name = "GPT"
    has_embedding_and_head = True

    @property
    def supports(self) -> Collection[Feature]:
        return get_args(Feature)

    @property
    def dtype(self) -> Dtype:
        return self.model.dtype

    @property
    def vocab_size(self) -> int | None:
        return self.model.vocab_size

    @property
    def layers(self) -> int:
        return self.model.layers

    def check(self) -> None:
        checks.check(self.model, self.conditions)

    def parameters(self, stage: StageSpec) -> Iterator[ParameterSpec]:
        return with_adapters(self.model, stage_parameters(self.model, stage), self.conditions.lora)

    def describe(self) -> str:
        model, moe = self.model, self.model.moe
        experts = ""
        if moe.num_experts is not None:
            beside = (
                "" if moe.shared_ffn_hidden is None else f" beside one of {moe.shared_ffn_hidden}"
            )
            each = self.experts()
            experts = (
                f", in {count_noun(len(each), 'layer')} {moe.top_k} of "
                f"{join_or(sorted(set(each.values())))} experts of {moe.expert_ffn_hidden}{beside}"
            )
        return (
            f"{model.layers} layers, hidden {model.hidden}, {model.heads} heads of "
            f"{model.head_dim} ({model.kv_heads} for keys and values), MLP {model.ffn_hidden} "
            f"{model.activation}{experts}, {model.dtype}"
        )

    def buffers(self) -> Mapping[str, tuple[int, ...]]:
        return buffers(self.model)

    def experts(self) -> Mapping[int, int]:
        moe = self.model.moe
        return {n: moe.experts_of(n) for n in filter(moe.has_experts, range(self.layers))}

    def routing_stat_counts(self) -> Mapping[int, int]:
        return {layer: routing_of(self.model.moe, layer).num_stats for layer in self.experts()}

    def kind(self, layer: int) -> Hashable:
        moe = self.model.moe
        routing = routing_of(moe, layer) if moe.has_experts(layer) else None
        return self.model.window_of(layer), routing

    def active_parameters(self) -> int:
        return self.num_parameters() - sum(
            unused_parameters(self.model, layer) for layer in self.experts()
        )

    def _once(self, layer: int) -> Once:
        conditions = self.conditions
        return Once.of(
            self.model, conditions.sequence_length, conditions.tp, layer, rows=self._rows(layer)
        )

    def _rows(self, layer: int) -> int | Fraction:
        """Return the expert rows per token in a layer, including padding up to the capacity."""
        conditions, moe = self.conditions, self.model.moe
        if not (conditions.pad_to_capacity and moe.has_experts(layer)):
            return moe.top_k
        tokens = conditions.sequence_length // (conditions.cp * conditions.tp)
        return Fraction(
            padded_rows(routing_of(moe, layer), tokens, 1, conditions.sequence_length), tokens
        )

    def unit_costs(self, repeated: UniformRecompute | None) -> Sequence[Time]:
        each = [self._once(layer) for layer in range(self.layers)]
        costs = [part_costs(once, repeated) for once in each]
        _, head = costs[-1]
        if self.conditions.lora is not None:  # only adapters have weight gradients
            saved = [once.layer - once.scores for once in each]
            layers = [
                cost - own + 3 * self._adapter_flops([layer])
                for layer, ((cost, _), own) in enumerate(zip(costs, saved, strict=True))
            ]
            return [Fraction(0), *layers, head - each[0].head]
        return [Fraction(0), *(layer for layer, _ in costs), head]

    def work(self, stage: StageSpec, spans: Sequence[BlockSpan], *, recompute: bool) -> Work:
        chunked = self.conditions.loss_chunk > 0
        work = stage_work(self._once, stage, spans, recompute=recompute, chunked=chunked)
        if self.conditions.lora is None:
            return work
        added, layers = self._adapter_flops(stage.layers), iter(stage.layers)
        own = [(span.policy, list(islice(layers, span.blocks))) for span in spans]
        repeated = sum(self._adapter_flops(n) for policy, n in own if "block" in policy.recompute)
        head = self._once(0).head if stage.head and chunked else 0
        return Work(
            F=work.F + added,
            I=work.I + added + repeated - head,
            W=added,
            R=work.R + recompute * added,
        )

    def _adapter_flops(self, layers: Iterable[int]) -> int:
        return sum(adapter_flops(self.model, self.conditions.lora, layer) for layer in layers)

    def reference_layer_flops(self) -> Time:
        return max(self._once(layer).layer for layer in range(self.layers))

    def forward_flops(self, stage: StageSpec) -> int:
        model, length = self.model, self.conditions.sequence_length
        layers = sum(
            layer_flops(model, length, model.window_of(layer), experts=model.moe.experts_of(layer))
            for layer in stage.layers
        )
        return layers + stage.head * head_flops(model)

    def token_flops(self) -> float:
        """Return training FLOPs per token; with `lora` only adapters have weight gradients."""
        if self.conditions.lora is None:
            return super().token_flops()
        scores = sum(self._once(layer).scores for layer in range(self.layers))
        added = 3 * self._adapter_flops(range(self.layers))
        return 2 * self.forward_flops(self.whole) + scores + added

    def causal_flops(self, length: int) -> int:
        return causal_flops(self.model, length)

    def output_shape(self, stage: StageSpec, rows: int, length: int) -> tuple[TensorShape, ...]:
        """Return the shape of a stage's hidden states, [s(/tp), b, h]."""
        split = self.conditions.tp if self.conditions.sequence_parallel else 1
        return (main_tensor((length // split, rows, self.model.hidden), self.dtype),)

    @property
    def kernel_needs(self) -> KernelNeeds:
        model, tp = self.model, self.conditions.tp
        heads, groups = model.heads // tp, known(model.kv_heads) // tp
        scores = scores_of(model, 0, 0, tp)._replace(window=model.sliding_window)
        attention = AttentionNeeds(heads, groups, known(model.head_dim), model.dropout, scores)
        centred = model.norm == "layernorm"
        norm = NormNeeds(
            model.hidden, model.norm_eps, centred, model.bias, model.zero_centered_norm
        )
        return KernelNeeds(
            attention,
            None if model.own_norm else norm,
            gate=model.activation == "swiglu",
            rotary=model.positions == "rotary",
            loss=self.conditions.loss_chunk > 0,
            experts=row_widths(model, self.conditions.etp),
        )

    def build(self, stage: StageSpec, sharding: Sharding) -> GPTStage:
        from megapipe.model.gpt.stage import GPTStage

        conditions = self.conditions
        return GPTStage(self.model, stage, sharding, load_loss(conditions), conditions.lora)

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
        from megapipe.model.gpt.compiled_check import check_compiled

        check_compiled(
            self.model,
            sharding,
            length=self.conditions.sequence_length,
            rows=rows,
            recompute=recompute,
            documents=documents,
            device=device,
            local_positions=local_positions,
        )
