"""The corpus of a run on all of its processes, and whether it is the checkpoint's."""

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
from megapipe.util.left_out import SkippedSamples
from megapipe.watch.journal import text

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=7)
"""How long the other processes wait for one of their node to tokenize a corpus, at most: monitors
(:mod:`megapipe.watch`) end the job where a rank is lost."""


def prepare_on_all(
    config: Config, tokenizer: Tokenizer, mesh: ParallelMesh, *, local_rank: int
) -> Sources:
    """The corpora; one process of each node prepares them before the others ask for them, and
    removes what killed jobs have left of others in the cache, which may be the node's own.

    Raises a :class:`MegapipeError` of any rank on all of them.
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
    """Call `make` on every process, on one of each node before the others, and return its result.

    It may take long. Raises a :class:`MegapipeError` of any rank on all of them.
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


def past_of(checkpoint: Checkpoint | None, *, anew: bool, left_out: SkippedSamples) -> ConsumedData:
    """How far a checkpoint is in the data, of which a run that begins leaves some out; `anew`: they
    are begun again. Raises :class:`CheckpointError`."""
    if checkpoint is None:
        return ConsumedData(left_out=left_out)
    if anew:
        return ConsumedData(checkpoint.step, left_out=left_out)
    found = ResumePoint.of(checkpoint)
    kept = SkippedSamples.stored(checkpoint.manifest.coordinates.get("left_out", []))
    gone = kept.going_on(left_out, found.samples)
    return ConsumedData(checkpoint.step, found.samples, found.order, gone)


def name_of(data: DataConfig) -> str:
    """The keys that say what is trained on, with their values."""
    if not data.mixture:
        return data.source
    return ", ".join(f"{name}={source.source}" for name, source in data.mixture.items())


def _compare_ranks(own: Sources, data: DataConfig, mesh: ParallelMesh) -> None:
    """Raise on every rank if one has another tokenizer or another data set than rank 0: its node
    has other files of these names, or the user's code has made another."""
    shared = mesh.share(json.dumps([own.tokenizer, own.everything, own.files]))
    tokenizer, everything, files = json.loads(shared)
    error = None
    if own.tokenizer != tokenizer:
        error = DataError(
            f"data.tokenizer={data.tokenizer}: rank {mesh.rank} has another tokenizer than rank 0, "
            "with other ids of texts or another end mark: expected the same in every process"
        )
    elif not own.is_like(everything, files):
        error = DataError(
            f"data.source={name_of(data)}: rank {mesh.rank} has other samples than rank 0: "
            "expected the same in every process and at every call"
        )
    raise_on_all(mesh, error)


def change_of_corpus(
    checkpoint: Checkpoint | None, prepared: Sources, data: DataConfig
) -> Change | None:
    """How the corpus `prepared` for `data` differs from the checkpoint's, or, where it has ids
    already, the tokenizer; None where the tokens are the same, whatever their names, or there is no
    checkpoint."""
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
    """The result of :func:`name_of` for the keys of a checkpoint."""
    mixture = json.loads(config.get("data.mixture", "{}"))
    if not mixture:
        return str(config.get("data.source"))
    return ", ".join(f"{name}={source['source']}" for name, source in mixture.items())
