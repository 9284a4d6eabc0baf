"""Small models of transformers classes, their training in layouts, and in the untouched class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.config.lora import LoraConfig
from megapipe.config.model import ModelConfig
from megapipe.layers.moe.dispatch import Dispatcher
from megapipe.layers.moe.permutation import ExpertCounts
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.model.hf import experts
from megapipe.plan.measurements import BY_UNITS
from megapipe.testing import World
from tests.parity.cases import END, Case, configure
from tests.parity.outcome import Outcome, assemble
from tests.parity.ranks import train
from tests.parity.reference import Params, Step
from tests.parity.user_models import check_steps, plain_steps

VOCAB = 300
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "olmo2": {},
    "phi3": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
    },
    "glm": {},
    "gemma3_text": {"sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 2,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 6},
    "deepseek_v3": {
        **MOE,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "qwen3_next": {
        **MOE,
        "num_experts": 8,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}
"""Settings of each family beside :data:`SIZES`, by its name in transformers."""


def make_class(family: str) -> Any:
    """Make a class in fp64 with random values in every tensor, those of norms included."""
    experts.register()
    settings = {**SIZES, **FAMILIES[family]}
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, experts_implementation=experts.NAME
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(torch.randn_like(buffer), alpha=0.1)
    return model.train()


class AllInDouble(TorchFunctionMode):
    """Mode in which fp64 tensors stay fp64: a class that computes routers, norms or recurrences in
    fp32 computes them in fp64 too, so that layouts agree as far as those of other classes."""

    CASTS = (torch.Tensor.to, torch.Tensor.type)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float and not args[0].is_floating_point():
            return args[0].double()  # positions, which are multiplied by fp64 frequencies
        if any(isinstance(each, torch.Tensor) and each.dtype == torch.float64 for each in args):
            if func is torch.Tensor.float:
                return args[0]
            if func in self.CASTS:
                args = tuple(_widened(each) for each in args)
            if "dtype" in kwargs:
                kwargs["dtype"] = _widened(kwargs["dtype"])
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


LORA = LoraConfig(rank=3, alpha=12.0, targets=["all"])


@dataclass(frozen=True)
class ClassCase:
    """A class in a folder, in a layout."""

    folder: Path
    case: Case
    all_in_double: bool = False
    """Whether :class:`AllInDouble` holds."""
    restarts: bool = False
    """Whether positions restart in each document."""
    adapts: bool = False
    """Whether adapters are trained instead of weights."""

    @property
    def name(self) -> str:
        return f"{self.folder.name}: {self.case.name}"

    def mode(self) -> AbstractContextManager[Any]:
        return AllInDouble() if self.all_in_double else nullcontext()


def settle(one: ClassCase) -> tuple[Config, Layout]:
    """Return the resolved configuration, and the layout."""
    config, _ = configure(one.case)
    model = ModelConfig(source=f"hf:{one.folder}", dtype="fp64")
    data = config.data.model_copy(update={"reset_position_ids": one.restarts})
    sections = {"model": model, "lora": LORA if one.adapts else LoraConfig(), "data": data}
    return resolve(config.model_copy(update=sections), one.case.world, None, measure=BY_UNITS)


@dataclass(frozen=True)
class ClassStages:
    """Stages of a class to be measured, like :class:`tests.parity.planned_stages.Stages`."""

    folder: Path
    case: Case
    rows: None = None
    adapts: bool = False

    @property
    def name(self) -> str:
        return f"{self.folder.name} {self.case.name}"

    @property
    def stages(self) -> Sequence[int]:
        return range(self.case.pp)

    def configure(self) -> tuple[Config, Layout]:
        return settle(ClassCase(self.folder, self.case, adapts=self.adapts))


def even_rows(choice: torch.Tensor, number: int, dispatcher: Dispatcher) -> ExpertCounts:
    """Count the rows of experts as if tokens chose them evenly; the real counts are exchanged."""
    counted = dispatcher.count(choice, number, dispatcher.counting).on_device
    known = [experts.even_counts(choice.numel(), number)] * dispatcher.counting.size
    assert counted is not None
    return ExpertCounts(known, torch.tensor(known, dtype=counted.dtype))


def measure_evenly(measure: Callable[..., Any], world: World, planned: Any) -> Any:
    """Call `measure` with experts that all get equally many rows, as in plans."""

    def counts(of_row: torch.Tensor, number: int) -> list[int]:
        return experts.even_counts(len(of_row), number)

    evenly = mock.patch.object(experts, "rows_of_ranks", even_rows)
    with mock.patch.object(experts, "row_counts", counts), evenly:
        return measure(world, planned)


def run_classes(world: World, every: Sequence[ClassCase]) -> list[Outcome]:
    """Train each class on this rank."""
    results = []
    for one in every:
        try:
            config, layout = settle(one)
            step = TrainStep(config, layout, world.mesh(one.case.grid), document_end=END)
            with one.mode():
                results.append(train(step, one.case, validate=False))
        except Exception as error:
            error.add_note(one.name)
            raise
    return results


def check_class(one: ClassCase, outcomes: Sequence[Outcome]) -> None:
    """Check all that a layout computed against the untouched class in one process."""
    with one.mode():
        initial, steps = train_untouched(one, outcomes)
    check_steps(outcomes, initial, steps, 1e-9)


def adapters_of(model: Any, one: ClassCase, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Put adapters on the linear layers of an untouched class, with the initial values that a run
    has drawn; return their matrices by name."""
    _, layout = settle(one)
    model.requires_grad_(False)
    like = {name: torch.empty(shape) for name, shape in layout.model.shapes().items()}
    drawn = assemble([outcome.values[0].get("model", []) for outcome in outcomes], like)
    trained = layout.model.shapes(trained=True)
    named = {name: torch.nn.Parameter(drawn[name]) for name in trained}

    def adapt(name: str, module: torch.nn.Module) -> None:
        a, b = (named[f"{name}.{which}.weight"] for which in ("lora_a", "lora_b"))
        module.register_forward_hook(
            lambda _, args, y: y + functional.linear(functional.linear(args[0], a), b) * 4.0
        )

    for name, module in model.model.layers.named_modules(prefix="model.layers"):
        if isinstance(module, torch.nn.Linear):
            adapt(name, module)
    return named


def by_document(
    row: torch.Tensor, logits_of: Callable[..., torch.Tensor], restarts: bool
) -> torch.Tensor:
    """Return the logits [s, V] of a sample's tokens [s], each document computed alone; with
    `restarts` its positions count from 0.

    `logits_of`: function (tokens [1, n], position of the first one) -> logits [1, n, V].
    """
    ends = [*(int(end) + 1 for end in (row == END).nonzero()), len(row)]
    starts = [0, *ends[:-1]]
    parts = [(row[a:b], a) for a, b in zip(starts, ends, strict=True) if a < b]
    return torch.cat([logits_of(part[None], 0 if restarts else first)[0] for part, first in parts])


def train_untouched(one: ClassCase, outcomes: Sequence[Outcome]) -> tuple[Params, list[Step]]:
    """Return the initial weights, and the steps of the class in plain torch."""
    model = AutoModelForCausalLM.from_pretrained(
        one.folder, dtype=torch.float64, experts_implementation=experts.NAME
    ).train()
    config, _ = settle(one)
    named = dict(model.named_parameters())
    if one.adapts:
        named |= adapters_of(model, one, outcomes)

    def logits_of(tokens: torch.Tensor, first: int = 0) -> torch.Tensor:
        positions = torch.arange(first, first + tokens.shape[1])[None]
        logits: torch.Tensor = model(
            input_ids=tokens, position_ids=positions, use_cache=False
        ).logits
        return logits

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        if not one.case.documents:
            return logits_of(tokens)
        return torch.stack([by_document(row, logits_of, one.restarts) for row in tokens])

    return plain_steps(one.case, config, named, forward, outcomes[0].rates)
