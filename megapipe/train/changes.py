"""Keys that may differ between a checkpoint and the run that goes on from it.

=========  ======================================================================================
harmless   how and where it is computed, saved and told: layout, kernels, ZeRO, logging
listed     how training goes on: learning rate, batch, clipping, dropout, types, a mixture, ... any
           key that is in no other class, and of a layout what the balance term of experts goes by
refused    what makes it another run: the corpus, the order of its samples (seed, sequence length),
           how its documents are rearranged, what counts in the loss, the model, its adapters.
           ``run.resume_changes=allow`` lists these too, as far as the tensors fit; the data then
           begin anew where their order is another
never      the update rule: its state would mean something else
=========  ======================================================================================

Keys that say how a corpus is read (:data:`OF_CORPUS`) are harmless as such: where they change what
it comes out as, the corpus is another, and they are named with it. A mixture that goes on with
other weights begins where the old one ended; an order of ``data.samples=megatron`` is made for one
mixture, so there another one is refused.

A new run that begins from ``checkpoint.load`` may have another corpus and order; its model has to
be the checkpoint's all the same. From weights alone nothing goes on but the model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import JsonValue

from megapipe import strict_yaml
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.storage import Place
from megapipe.cli import flatten
from megapipe.config import Config
from megapipe.errors import CheckpointError

OF_CORPUS = (
    *("data.source", "data.subset", "data.dataset_split", "data.text_field", "data.tokenizer"),
    *("data.validation_fraction", "data.split", "data.validation"),
    *("data.prompt_field", "data.completion_field", "data.messages_field"),
    *("data.chat_template", "data.train_on"),
)
"""Keys that say what is read, and how; what that comes out as is compared."""
HARMLESS = (
    *("run.", "parallel.", "pipeline.", "activations.", "kernels.", "checkpoint.", "log."),
    "experts.",
    *(*OF_CORPUS, "data.test", "data.cache", "data.workers", "data.prefetch"),
    *("optimizer.zero", "optimizer.shard_size", "optimizer.prefetch", "optimizer.post_validation"),
    *("optimizer.offload", "optimizer.offload_folder", "optimizer.window_mib"),
    *("train.microbatch", "train.validate_every", "train.validation_samples", "train.stop_after"),
    *("numbers.rerun", "numbers.rerun_every", "numbers.check_copies_every", "model.init_std"),
    "model.moe.router_init_scale",
)
"""Harmless keys, and sections whose keys are harmless unless they are refused."""
ORDER = (
    *("run.seed", "train.sequence_length", "data.samples"),
    *("data.fim_rate", "data.fim_spm_rate", "data.fim_tokens"),
)
"""Keys that decide, with the corpus, which tokens a sample number stands for."""
REFUSED = (
    *(*ORDER, "data.mask_document_ends", "data.document_mask", "data.reset_positions"),
    "train.loss",
)
MIXTURE, TEMPERATURE = "data.mixture", "data.temperature"
"""Listed, unless the order is Megatron-LM's."""
LISTED = (
    *("pipeline.weights", "pipeline.horizon", "pipeline.correction"),
    *("pipeline.lr_anneal_steps", "pipeline.synchronous_steps"),
    *("experts.codec", "experts.topology"),
)
"""All other keys of these sections are harmless."""
LISTED_OF_MODEL = (
    *("model.dtype", "model.dropout", "model.moe.balance", "model.moe.balance_scope"),
    *("model.moe.balance_choices", "model.moe.z", "model.moe.capacity", "model.moe.drop"),
    *("model.moe.bias_rate", "model.moe.jitter", "model.moe.second"),
)
"""All other keys of the model, and those of its adapters, are refused."""
BIASES = "model.moe.bias_rate"
"""Refused where there are biases in one of both alone."""
ADAPTERS = "lora.rank"


@dataclass(frozen=True)
class Change:
    """A key that has another value than in the checkpoint."""

    key: str
    stored: Any
    now: Any
    because: tuple[Change, ...] = ()
    """Of other keys, which may be why."""

    def __str__(self) -> str:
        before, now = map(strict_yaml.text_of, (self.stored, self.now))
        why = f" ({', '.join(map(str, self.because))})" if self.because else ""
        return f"{self.key} was {before} and is {now}{why}"

    @property
    def harmless(self) -> bool:
        """Whether nothing that is learnt depends on it, unless a balance term goes by it."""
        if self.refused or self.key in LISTED:
            return False
        return any(
            self.key.startswith(name) if name.endswith(".") else self.key == name
            for name in HARMLESS
        )

    @property
    def of_model(self) -> bool:
        if self.key == BIASES:
            return None in (self.stored, self.now)
        return (
            self.key.startswith(("model.", "lora."))
            and self.key not in LISTED_OF_MODEL
            and self.key not in HARMLESS
        )

    @property
    def refused(self) -> bool:
        """Whether it makes another run."""
        return self.key in REFUSED or self.of_model


@dataclass(frozen=True)
class Changes:
    """Lines to print, and whether samples are to be counted from 0 again."""

    told: tuple[Change, ...] = ()
    data_anew: bool = False


def check(checkpoint: Checkpoint, config: Config, *, own: bool, corpus: Change | None) -> Changes:
    """Changes since a checkpoint, of this run (`own`) or another.

    `corpus` is the change of the corpus or of its tokenizer; None where these are the same, or not
    known yet. Raises :class:`CheckpointError` for changes with which the run cannot go on.
    """
    changes = compare(checkpoint.manifest.config, config)
    order = {*ORDER, "corpus", *(c.key for c in changes if _deals_otherwise(c, config))}
    if corpus is not None:
        why = tuple(change for change in changes if change.key in OF_CORPUS)
        changes.append(replace(corpus, because=why))
    for change in changes:
        if change.key == "optimizer.rule":
            raise CheckpointError(
                f"{checkpoint.path}: its optimizer state is of optimizer.rule={change.stored}, the "
                f"configuration has {change.now}"
            )
    adapters = _adapters(checkpoint.path, changes)
    if adapters is not None and not own:
        raise adapters
    another = {*order, *REFUSED, "tokenizer"} if own else set()
    refused = [change for change in changes if change.of_model or change.key in another]
    if refused and config.run.resume_changes == "refuse":
        raise CheckpointError(
            f"{checkpoint.path} is of another run: {'; '.join(map(str, refused))}; change back, "
            "choose another run.name, or set run.resume_changes=allow"
        )
    balanced_by = _balanced_by(config)
    return Changes(
        tuple(each for each in changes if not each.harmless or each.key in balanced_by),
        data_anew=any(change.key in order for change in changes),
    )


def _balanced_by(config: Config) -> Collection[str]:
    """Keys of the layout by which the balance term of experts goes."""
    moe, topology = config.model.moe, config.experts.topology or ()
    of_ranks = ("parallel.ep", "train.microbatch") if topology else ()
    of_nodes = ("experts.node",) if len(topology) == 3 else ()
    of_scope = ("train.microbatch",) if moe.balance and moe.balance_scope == "microbatch" else ()
    return {*of_ranks, *of_nodes, *of_scope}


def _deals_otherwise(change: Change, config: Config) -> bool:
    """Whether a change of the mixture changes an order that was made for all of the run."""
    if config.data.samples != "megatron" or change.key not in (MIXTURE, TEMPERATURE):
        return False
    return change.key == TEMPERATURE or _weights(change.stored) != _weights(change.now)


def _weights(mixture: str) -> list[tuple[str, Any]]:
    """Names and weights of sources, in their order, as a configuration stores them."""
    return [(name, source["weight"]) for name, source in json.loads(mixture).items()]


def check_weights(path: Place, stored: Mapping[str, JsonValue], config: Config) -> Changes:
    """Check that weights at `path`, of which `stored` has the keys of the model, are of the run's;
    returns how it goes on otherwise, as with another balance of experts.

    Raises :class:`CheckpointError` that names the keys which differ.
    """
    changes = compare(stored, config)
    wrong = [change for change in changes if change.of_model]
    if stored.get(ADAPTERS) is None:  # they begin afresh
        wrong = [change for change in wrong if not change.key.startswith("lora.")]
    elif (adapters := _adapters(path, wrong)) is not None:
        raise adapters
    if wrong and config.run.resume_changes == "refuse":
        right = (
            f"{c.key} is {strict_yaml.text_of(c.now)}, there {strict_yaml.text_of(c.stored)}"
            for c in wrong
        )
        raise CheckpointError(
            f"checkpoint.load: {path} is of another model: {'; '.join(right)}; "
            f"megapipe convert inspect {path} --config prints what fits"
        )
    told = stored.keys() & {*LISTED_OF_MODEL} - {"model.dtype"}
    return Changes(tuple(change for change in changes if change.key in told))


def _adapters(path: Place, changes: Iterable[Change]) -> CheckpointError | None:
    """The error where one of a checkpoint and a run has adapters, and the other has none."""
    change = next((each for each in changes if each.key == ADAPTERS), None)
    if change is not None and change.stored is None:
        return CheckpointError(
            f"{path} has no adapters, and {ADAPTERS}={change.now}: to train new ones beside its "
            "weights set checkpoint.load_only=weights"
        )
    if change is not None and change.now is None:
        return CheckpointError(
            f"{path} has adapters, {ADAPTERS}={change.stored}: expected the same lora section, or "
            "the merged weights, which megapipe convert megapipe-to-hf writes"
        )
    return None


def compare(stored: Mapping[str, JsonValue], config: Config) -> list[Change]:
    """Return the keys whose values differ; one that the checkpoint lacks had its default, or did as
    version 0.1."""
    defaults = flatten(Config())
    if stored.get("optimizer.rule") == "muon":
        defaults["optimizer.muon_split"] = "none"
    return [
        Change(key, before, now)
        for key, now in flatten(config).items()
        if (before := stored.get(key, defaults[key])) != now
    ]
