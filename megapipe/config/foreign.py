"""Recognizes configurations and flags of other trainers, and names the page that maps them."""

from __future__ import annotations

import json
import tomllib
from typing import Any, NamedTuple

import yaml

from megapipe.config.megatron_flags import FLAGS


class Trainer(NamedTuple):
    """A program whose configuration files megapipe does not read."""

    name: str
    page: str
    """Page that maps the trainer's keys to megapipe's."""
    unique_keys: frozenset[str]
    """Sections and dotted keys of the trainer; a single one in a file identifies the trainer."""
    shared: frozenset[str] = frozenset()
    """Keys of this trainer that could also be misspelled megapipe keys; two of them in a file
    identify the trainer."""

    def has_written(self, keys: set[str]) -> bool:
        """Whether a file with these dotted keys is a configuration of the trainer."""
        return bool(self.unique_keys & keys) or len(self.shared & keys) > 1


TORCHTITAN = Trainer(
    "torchtitan",
    "docs/from_others.md",
    frozenset({"job", "training", "parallelism", "lr_scheduler", "metrics", "comm"})
    | {"activation_checkpoint", "profiling", "float8", "model.flavor"},
)
"""The trainer torchtitan. Its files are TOML; megapipe's never are."""
NANOTRON = Trainer(
    "nanotron",
    "docs/from_others.md",
    frozenset({"data_stages", "lighteval", "model.model_config", "model.init_method"})
    | {"parallelism.pp_engine", "parallelism.tp_mode", "optimizer.optimizer_factory"}
    | {"optimizer.learning_rate_scheduler", "checkpoints.checkpoint_interval"}
    | {"tokens.micro_batch_size", "tokens.batch_accumulation_per_replica"}
    | {"tokenizer.tokenizer_name_or_path", "logging.iteration_step_info_interval"},
    frozenset({"general", "parallelism", "tokens", "checkpoints"}),
)
DEEPSPEED = Trainer(
    "DeepSpeed",
    "docs/from_deepspeed.md",
    frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"})
    | {"steps_per_print", "wall_clock_breakdown", "optimizer.params", "scheduler.params"}
    | {"bf16.enabled", "fp16.enabled", "activation_checkpointing.partition_activations"},
    frozenset({"gradient_accumulation_steps", "gradient_clipping", "bf16", "fp16"})
    | {"optimizer.type", "scheduler.type"},
)


def describe_file(text: str, suffix: str) -> str | None:
    """Describe a configuration file of another trainer, and name the page that maps its keys.

    Returns None for an unknown file. `suffix`: ending of the file's name.
    """
    tables = _tables(text)
    if tables or suffix == ".toml":
        if TORCHTITAN.has_written(_dotted(tables)):
            return _of(TORCHTITAN)
        return (
            f"TOML, where a configuration is YAML; {TORCHTITAN.page} maps the keys of "
            f"{TORCHTITAN.name}"
        )
    keys = _dotted(_mapping(text))
    return next((_of(each) for each in (NANOTRON, DEEPSPEED) if each.has_written(keys)), None)


def describe_flag(flag: str) -> str | None:
    """Name the program that has a flag which megapipe lacks, and the page that maps the program's
    flags. `flag` has no leading dashes. Return None if no known program has it."""
    name = flag.replace("_", "-")
    if (key := FLAGS.get(name)) is not None:
        of_experts = name.startswith("moe-") or "expert" in name
        here = f" (here {key})" if key else ""
        page = "docs/moe.md" if of_experts else "docs/from_megatron.md"
        return f"a flag of Megatron-LM{here}: {page} maps them"
    if name in ("deepspeed", "deepspeed-config"):
        return f"a flag of {DEEPSPEED.name}: {DEEPSPEED.page} maps the keys of its configuration"
    section, dot, _ = flag.partition(".")
    if dot and section in TORCHTITAN.unique_keys:
        return f"a flag of {TORCHTITAN.name}: {TORCHTITAN.page} maps them"
    return None


def _of(trainer: Trainer) -> str:
    return f"a configuration of {trainer.name}, whose keys are others: {trainer.page} maps them"


def _tables(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}


def _mapping(text: str) -> Any:
    """Read a text as JSON or YAML, ignoring tags; None if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return yaml.load(text, yaml.BaseLoader)  # creates only text, lists and mappings
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        return None


def _dotted(content: Any) -> set[str]:
    """Return the keys of the first two levels, as dotted names."""
    found = set()
    for key, value in content.items() if isinstance(content, dict) else ():
        found.add(f"{key}")
        if isinstance(value, dict):
            found.update(f"{key}.{inner}" for inner in value)
    return found
