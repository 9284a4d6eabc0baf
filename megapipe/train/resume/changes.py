"""Keys that may differ between a checkpoint and the run that goes on from it.

Each key has a class, which its field says (:class:`~megapipe.config.section.OnResume`):

=========  ======================================================================================
harmless   how and where it is computed, saved and told: layout, kernels, ZeRO, logging
corpus     how a corpus is read: harmless as such; where it comes out as another, which is refused,
           they are named with it
listed     how training goes on: learning rate, batch, clipping, dropout, types, a mixture, ...
order      which samples there are, and in which order: seed, sequence length. Refused
refused    what else makes it another run: how documents are rearranged, what counts in the loss
model      the model and its adapters: refused, also of weights alone
never      the update rule: its state would mean something else
=========  ======================================================================================

``run.resume_changes=allow`` lists what is refused, as far as the tensors fit; the data then begin
anew where their order is another.

Three classes depend on values. Of a layout that is listed which the balance term of experts goes
by. Biases of experts may change their rate, and neither come nor go. A mixture that goes on with
other weights begins where the old one ended; an order of ``data.samples=megatron`` is made for one
mixture, so there another one is of the class order.

A new run that begins from ``checkpoint.load`` may have another corpus and order; its model has to
be the checkpoint's all the same. From weights alone nothing goes on but the model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import JsonValue

from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.storage import StorageLocation
from megapipe.cli import flatten
from megapipe.config import strict_yaml
from megapipe.config.config import Config
from megapipe.config.section import OnResume, keys_within, on_resume
from megapipe.errors import CheckpointError

MIXTURE, TEMPERATURE = "data.mixture", "data.temperature"
BIASES = "model.moe.bias_rate"
ADAPTERS = "lora.rank"


@dataclass(frozen=True)
class Change:
    """A key that has another value than in the checkpoint."""

    key: str
    stored: Any
    now: Any
    kind: OnResume = OnResume.LISTED
    because: tuple[Change, ...] = ()
    """Of other keys, which may be why."""

    def __str__(self) -> str:
        before, now = map(strict_yaml.text_of, (self.stored, self.now))
        why = f" ({', '.join(map(str, self.because))})" if self.because else ""
        return f"{self.key} was {before} and is {now}{why}"


@dataclass(frozen=True)
class Changes:
    """Lines to print, and whether samples are to be counted from 0 again."""

    to_report: tuple[Change, ...] = ()
    data_anew: bool = False


def check(checkpoint: Checkpoint, config: Config, *, own: bool, corpus: Change | None) -> Changes:
    """Changes since a checkpoint, of this run (`own`) or another.

    `corpus` is the change of the corpus or of its tokenizer; None where these are the same, or not
    known yet. Raises :class:`CheckpointError` for changes with which the run cannot go on.
    """
    changes = compare(checkpoint.manifest.config, config)
    if corpus is not None:
        why = tuple(change for change in changes if change.kind is OnResume.CORPUS)
        changes.append(replace(corpus, because=why))
    for change in changes:
        if change.kind is OnResume.NEVER:
            raise CheckpointError(
                f"{checkpoint.path}: its optimizer state is of {change.key}={change.stored}, the "
                f"configuration has {change.now}"
            )
    adapters = _adapters(checkpoint.path, changes)
    if adapters is not None and not own:
        raise adapters
    another = {OnResume.MODEL, OnResume.ORDER, OnResume.REFUSED} if own else {OnResume.MODEL}
    refused = [change for change in changes if change.kind in another]
    if refused and config.run.resume_changes == "refuse":
        raise CheckpointError(
            f"{checkpoint.path} is of another run: {'; '.join(map(str, refused))}; change back, "
            "choose another run.name, or set run.resume_changes=allow"
        )
    harmless = (OnResume.HARMLESS, OnResume.CORPUS)
    return Changes(
        tuple(change for change in changes if change.kind not in harmless),
        data_anew=any(change.kind is OnResume.ORDER for change in changes),
    )


def _by_values(change: Change, config: Config) -> OnResume:
    """Return the class of a change: that of its key, unless values decide."""
    if change.key == BIASES and None in (change.stored, change.now):
        return OnResume.MODEL
    if _deals_otherwise(change, config):
        return OnResume.ORDER
    if change.key in _balanced_by(config):
        return OnResume.LISTED
    return change.kind


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


def check_weights(
    path: StorageLocation, stored: Mapping[str, JsonValue], config: Config
) -> Changes:
    """Check that weights at `path`, of which `stored` has the keys of the model, are of the run's;
    returns how it goes on otherwise, as with another balance of experts.

    Raises :class:`CheckpointError` that names the keys which differ.
    """
    changes = compare(stored, config)
    wrong = [change for change in changes if change.kind is OnResume.MODEL]
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
    of_training = {
        key
        for key, section, name in keys_within(type(config))
        if key.startswith("model.") and on_resume(section, name) is OnResume.LISTED
    }
    told = stored.keys() & of_training - {"model.dtype"}
    return Changes(tuple(change for change in changes if change.key in told))


def _adapters(path: StorageLocation, changes: Iterable[Change]) -> CheckpointError | None:
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
    defaults = flatten(type(config)())
    if stored.get("optimizer.rule") == "muon":
        defaults["optimizer.muon_split"] = "none"
    now = flatten(config)
    changes = [
        Change(key, before, now[key], on_resume(section, name))
        for key, section, name in keys_within(type(config))
        if (before := stored.get(key, defaults[key])) != now[key]
    ]
    return [replace(change, kind=_by_values(change, config)) for change in changes]
