"""Configuration keys that may differ between a checkpoint and the run that resumes from it.

Each key has a class, which its field declares (:class:`~megapipe.config.section.OnResume`):

=========  ======================================================================================
harmless   how and where a run is computed, saved, reported: layout, kernels, ZeRO, logging
corpus     how a corpus is read: harmless if the corpus stays equal. A changed corpus is refused,
           and the error names these keys
listed     how training continues: learning rate, batch, clipping, dropout, types, a mixture, ...
order      which samples there are, and in which order: seed, sequence length, FIM. Refused
refused    what else makes it another run: loss function, document mask, positions, EOS in the loss
model      the model and its adapters: refused, also if only weights are loaded
never      the update rule: its state would mean something else
=========  ======================================================================================

``run.resume_changes=allow`` prints refused changes and goes on, if the tensors fit. The data then
start over if their order differs.

Some classes depend on values. Layout keys on which the auxiliary loss depends are listed. The rate
of experts' biases may change, but biases cannot be added or removed. A mixture that resumes with
other weights begins where the old one ended; but an order of ``data.sample_format=megatron`` is
made for one mixture, so a change has the class order.

A new run that begins from ``checkpoint.load`` may have another corpus and order, but its model must
be the checkpoint's. If only weights are loaded, only the model must fit.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import JsonValue, ValidationError

from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.storage import StorageLocation
from megapipe.cli import flatten
from megapipe.config import strict_yaml
from megapipe.config.config import Config
from megapipe.config.keys import OPTIONS_OF
from megapipe.config.section import OnResume, keys_within, on_resume
from megapipe.errors import CheckpointError

MIXTURE, TEMPERATURE = "data.mixture", "data.temperature"
BIASES = "model.moe.bias_update_rate"
ADAPTERS = "lora.rank"


@dataclass(frozen=True)
class Change:
    """A configuration key whose value differs from the checkpoint's."""

    key: str
    stored: Any
    now: Any
    kind: OnResume = OnResume.LISTED
    because: tuple[Change, ...] = ()
    """Changes of other keys that may be the cause."""

    def __str__(self) -> str:
        before, now = map(strict_yaml.text_of, (self.stored, self.now))
        why = f" ({', '.join(map(str, self.because))})" if self.because else ""
        return f"{self.key} was {before} and is {now}{why}"


@dataclass(frozen=True)
class Changes:
    """Changes to report, and whether samples are counted from 0 again."""

    to_report: tuple[Change, ...] = ()
    data_anew: bool = False


def check(checkpoint: Checkpoint, config: Config, *, own: bool, corpus: Change | None) -> Changes:
    """Return the changes since a checkpoint. `own`: whether it belongs to this run.

    `corpus` is the change of the corpus or of its tokenizer; None if there is none, or it is not
    known yet. Raises :class:`CheckpointError` for changes with which the run cannot resume.
    """
    changes = compare(checkpoint.manifest.config, config)
    if corpus is not None:
        why = tuple(change for change in changes if change.kind is OnResume.CORPUS)
        changes.append(replace(corpus, because=why))
    for change in changes:
        if change.kind is OnResume.NEVER:
            raise CheckpointError(
                f"{checkpoint.path}: its optimizer state was made with "
                f"{change.key}={change.stored}, but the configuration has {change.now}"
            )
    adapters = _adapters(checkpoint.path, changes)
    if adapters is not None and not own:
        raise adapters
    another = {OnResume.MODEL, OnResume.ORDER, OnResume.REFUSED} if own else {OnResume.MODEL}
    refused = [change for change in changes if change.kind in another]
    if refused and config.run.resume_changes == "refuse":
        raise CheckpointError(
            f"{checkpoint.path} belongs to another run: {'; '.join(map(str, refused))}; "
            "change back, choose another run.name, or set run.resume_changes=allow"
        )
    harmless = (OnResume.HARMLESS, OnResume.CORPUS)
    return Changes(
        tuple(change for change in changes if change.kind not in harmless),
        data_anew=any(change.kind is OnResume.ORDER for change in changes),
    )


def _by_values(change: Change, config: Config) -> OnResume:
    """Return the class of a change: usually the key's class, but some values have another."""
    if change.key == BIASES and None in (change.stored, change.now):
        return OnResume.MODEL
    if _deals_otherwise(change, config):
        return OnResume.ORDER
    if change.key in _balanced_by(config):
        return OnResume.LISTED
    return change.kind


def _balanced_by(config: Config) -> Collection[str]:
    """Return the layout keys on which the auxiliary loss depends."""
    moe, topology = config.model.moe, config.experts.link_bandwidths or ()
    of_ranks = ("parallel.ep", "train.microbatch") if topology else ()
    of_nodes = ("experts.ranks_per_node",) if len(topology) == 3 else ()
    of_scope = (
        ("train.microbatch",) if moe.aux_loss_coeff and moe.aux_loss_scope == "microbatch" else ()
    )
    return {*of_ranks, *of_nodes, *of_scope}


def _deals_otherwise(change: Change, config: Config) -> bool:
    """Whether a change of the mixture changes a sample order that was made for the whole run."""
    if config.data.sample_format != "megatron" or change.key not in (MIXTURE, TEMPERATURE):
        return False
    return change.key == TEMPERATURE or _weights(change.stored) != _weights(change.now)


def _weights(mixture: str) -> list[tuple[str, Any]]:
    """Return name and weight of each source of a stored mixture, in order."""
    return [(name, source["weight"]) for name, source in json.loads(mixture).items()]


def check_weights(
    path: StorageLocation, stored: Mapping[str, JsonValue], config: Config
) -> Changes:
    """Check that weights at `path`, of a model with the configuration `stored`, fit the run's
    model. Returns changes that affect only training, such as a change of the auxiliary loss.

    Raises :class:`CheckpointError`, which names the keys that differ.
    """
    changes = compare(stored, config)
    wrong = [change for change in changes if change.kind is OnResume.MODEL]
    if stored.get(ADAPTERS) is None:  # new adapters are initialised
        wrong = [change for change in wrong if not change.key.startswith("lora.")]
    elif (adapters := _adapters(path, wrong)) is not None:
        raise adapters
    if wrong and config.run.resume_changes == "refuse":
        right = (
            f"{c.key} is {strict_yaml.text_of(c.now)}, stored is {strict_yaml.text_of(c.stored)}"
            for c in wrong
        )
        raise CheckpointError(
            f"checkpoint.load: {path} belongs to another model: {'; '.join(right)}; megapipe "
            f"convert inspect {path} --config prints the matching configuration"
        )
    of_training = {
        key
        for key, section, name in keys_within(type(config))
        if key.startswith("model.") and on_resume(section, name) is OnResume.LISTED
    }
    listed = stored.keys() & of_training - {"model.dtype"}
    return Changes(tuple(change for change in changes if change.key in listed))


def _adapters(path: StorageLocation, changes: Iterable[Change]) -> CheckpointError | None:
    """Return the error if only one of checkpoint and run has adapters; None otherwise."""
    change = next((each for each in changes if each.key == ADAPTERS), None)
    if change is not None and change.stored is None:
        return CheckpointError(
            f"{path} has no adapters, and {ADAPTERS}={change.now}: to train new adapters on "
            "its weights set checkpoint.load_only=weights"
        )
    if change is not None and change.now is None:
        return CheckpointError(
            f"{path} has adapters, {ADAPTERS}={change.stored}: expected the same lora section, or "
            "the merged weights, which megapipe convert megapipe-to-hf writes"
        )
    return None


def _with_defaults(stored: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Return the stored configuration with all options of mappings filled in, in the form in which
    :func:`flatten` writes them. An option that is not stored had its default."""
    found = dict(stored)
    for mapping, rule in OPTIONS_OF.items():
        value = stored.get(mapping)
        if isinstance(value, str):
            with contextlib.suppress(ValidationError):  # of another version: compared as it is
                found[mapping] = json.dumps(rule.complete(stored.get(rule.key), json.loads(value)))
    return found


def compare(stored: Mapping[str, JsonValue], config: Config) -> list[Change]:
    """Return changes of all keys whose values differ; a key that is not stored had its default."""
    defaults = flatten(type(config)())
    now, stored = flatten(config), _with_defaults(stored)
    changes = [
        Change(key, before, now[key], on_resume(section, name))
        for key, section, name in keys_within(type(config))
        if (before := stored.get(key, defaults[key])) != now[key]
    ]
    return [replace(change, kind=_by_values(change, config)) for change in changes]
