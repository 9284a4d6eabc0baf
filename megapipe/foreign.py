"""Tells another trainer's configuration from a mistake, and names the page that maps its keys."""

from __future__ import annotations

import json
import re
from typing import NamedTuple


class Trainer(NamedTuple):
    """A program whose files and flags are not read here."""

    name: str
    page: str
    """Where its keys are mapped to those of megapipe."""
    marks: frozenset[str]
    """Sections or keys of its own, none of which megapipe has; two of them are enough."""


TORCHTITAN = Trainer(
    "torchtitan",
    "docs/from_others.md",
    frozenset({"job", "training", "parallelism", "lr_scheduler", "metrics", "comm"})
    | {"activation_checkpoint", "profiling", "float8"},
)
NANOTRON = Trainer(
    "nanotron",
    "docs/from_others.md",
    frozenset({"general", "parallelism", "tokens", "data_stages", "checkpoints", "lighteval"}),
)
DEEPSPEED = Trainer(
    "DeepSpeed",
    "docs/from_deepspeed.md",
    frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"})
    | {"gradient_accumulation_steps", "gradient_clipping", "steps_per_print", "bf16", "fp16"},
)
MEGATRON = Trainer(
    "Megatron-LM",
    "docs/from_megatron.md",
    frozenset({"num-layers", "hidden-size", "num-attention-heads", "seq-length", "train-iters"})
    | {"ffn-hidden-size", "max-position-embeddings", "micro-batch-size", "global-batch-size"}
    | {"tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"}
    | {"num-layers-per-virtual-pipeline-stage", "sequence-parallel", "use-distributed-optimizer"}
    | {"lr-decay-style", "lr-warmup-iters", "lr-decay-iters", "min-lr", "weight-decay"}
    | {"clip-grad", "data-path", "tokenizer-type", "tokenizer-model", "split", "save", "load"}
    | {"save-interval", "eval-interval", "eval-iters", "log-interval"}
    | {"disable-bias-linear", "swiglu", "normalization"}
    | {"position-embedding-type", "group-query-attention", "num-query-groups"},
)


def trainer_of(text: str) -> Trainer | None:
    """The trainer whose configuration a file's text is, in TOML, YAML or JSON."""
    keys = _top_level(text)
    found = (each for each in (TORCHTITAN, NANOTRON, DEEPSPEED) if len(each.marks & keys) > 1)
    return next(found, None)


def trainer_of_flag(flag: str) -> Trainer | None:
    """The trainer that has a flag, written without its dashes at the beginning."""
    return MEGATRON if flag.replace("_", "-") in MEGATRON.marks else None


def _top_level(text: str) -> set[str]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        sections = re.findall(r"^\[(\w+)[\w.]*\]", text, re.MULTILINE)
        return {*sections, *re.findall(r"^(\w+)[ \t]*:(?:\s|$)", text, re.MULTILINE)}
    return set(content) if isinstance(content, dict) else set()
