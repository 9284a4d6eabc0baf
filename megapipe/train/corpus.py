"""Preparation of a run's corpus on all processes, and its comparison with the checkpoint's."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megapipe.checkpoint.reader import Checkpoint
from megapipe.config.config import Config
from megapipe.config.data import DataConfig
from megapipe.config.section import OnResume
from megapipe.data.build import ConsumedData
from megapipe.data.prepare.leftovers import remove_leftovers
from megapipe.data.sources import Sources, load_sources
from megapipe.data.tokenizer import Tokenizer
from megapipe.distributed.agreement import raise_on_all
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import DataError, MegapipeError
from megapipe.train.resume.changes import Change
from megapipe.train.resume.coordinates import ResumePoint
from megapipe.util import heartbeat
from megapipe.util.skipped_samples import SkippedSamples
from megapipe.watch.journal import text

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=7)
"""Longest time that a node's other processes wait while one of them tokenizes a corpus; monitors
(:mod:`megapipe.watch`) end the job earlier if a rank is lost."""


def prepare_on_all(
    config: Config, tokenizer: Tokenizer, mesh: ParallelMesh, *, local_rank: int
) -> Sources:
    """Load the corpora: one process of each node prepares them before the others load them. That
    process also removes leftovers of killed jobs from the cache, which may be local to the node.

    Raises a :class:`MegapipeError` of any rank on all ranks.
    """

    def load() -> Sources:
        sources = load_sources(config, tokenizer, progress=mesh.rank == 0)
        if local_rank == 0:
            remove_leftovers(Path(config.data.cache), heartbeat.print_notice)
        return sources

    prepared = on_node_leaders_first(mesh, local_rank, load)
    _compare_ranks(prepared, config.data, mesh)
    return prepared


def on_node_leaders_first(mesh: ParallelMesh, local_rank: int, make: Callable[[], T]) -> T:
    """Call `make` on every process, first on one process of each node, and return its result.

    The call may take long. Raises a :class:`MegapipeError` of any rank on all ranks.
    """
    mesh.journal.set_activity(text("preparing the data"))
    made: list[T] = []
    error = None
    for turn in (local_rank == 0, local_rank != 0):
        if turn:
            try:
                made.append(make())
            except MegapipeError as problem:
                error = problem
        mesh.long_barrier(PATIENCE)
        raise_on_all(mesh, error)
    return made[0]


def past_of(
    checkpoint: Checkpoint | None, *, anew: bool, skipped_samples: SkippedSamples
) -> ConsumedData:
    """Return a checkpoint's position in the data. `anew`: count samples from 0 again.
    `skipped_samples`: samples that the configuration skips. Raises :class:`CheckpointError`."""
    if checkpoint is None:
        return ConsumedData(skipped_samples=skipped_samples)
    if anew:
        return ConsumedData(checkpoint.step, skipped_samples=skipped_samples)
    found = ResumePoint.of(checkpoint)
    kept = SkippedSamples.stored(checkpoint.manifest.coordinates.get("skipped_samples", []))
    gone = kept.going_on(skipped_samples, found.samples)
    return ConsumedData(checkpoint.step, found.samples, found.order, gone)


def name_of(data: DataConfig) -> str:
    """Return a name of the training data for messages, from the settings that select them."""
    if not data.mixture:
        return data.source
    return ", ".join(f"{name}={source.source}" for name, source in data.mixture.items())


def _compare_ranks(own: Sources, data: DataConfig, mesh: ParallelMesh) -> None:
    """Raise on every rank if a rank has another tokenizer or data set than rank 0, for example
    because its node has other files under the same names."""
    shared = mesh.share(json.dumps([own.tokenizer, own.everything, own.files]))
    tokenizer, everything, files = json.loads(shared)
    error = None
    if own.tokenizer != tokenizer:
        error = DataError(
            f"data.tokenizer={data.tokenizer}: rank {mesh.rank} has another tokenizer than "
            "rank 0, with other token ids or another end mark: expected the same tokenizer in "
            "every process"
        )
    elif not own.is_like(everything, files):
        error = DataError(
            f"data.source={name_of(data)}: rank {mesh.rank} has other samples than rank 0: "
            "expected the same samples in every process and at every call"
        )
    raise_on_all(mesh, error)


def change_of_corpus(
    checkpoint: Checkpoint | None, prepared: Sources, data: DataConfig
) -> Change | None:
    """Return how the corpus `prepared` differs from the checkpoint's; if its tokens are equal,
    return how the tokenizer differs. None if neither differs, or there is no checkpoint."""
    if checkpoint is None:
        return None
    config, stored = checkpoint.manifest.config, checkpoint.manifest.digests
    if prepared.digest != stored.get("corpus") and prepared.content != stored.get("content"):
        before = f"{_stored_name(config)} ({stored.get('content', 'unknown')[:8]})"
        now = f"{name_of(data)} ({prepared.content[:8]})"
        return Change("corpus", before, now, OnResume.ORDER)
    tokenizer = stored.get("tokenizer", prepared.tokenizer)
    if prepared.tokenizer == tokenizer:
        return None
    before = f"{config.get('data.tokenizer')} ({tokenizer[:8]})"
    now = f"{data.tokenizer} ({prepared.tokenizer[:8]})"
    return Change("tokenizer", before, now, OnResume.REFUSED)


def _stored_name(config: Mapping[str, Any]) -> str:
    """Return the name of a checkpoint's training data for messages, from its configuration."""
    mixture = json.loads(config.get("data.mixture", "{}"))
    if not mixture:
        return str(config.get("data.source"))
    return ", ".join(f"{name}={source['source']}" for name, source in mixture.items())
