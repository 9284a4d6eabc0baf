"""The corpus of a run on all of its processes, and whether it is the checkpoint's."""

from __future__ import annotations

import datetime

from megapipe.checkpoint.reader import Checkpoint
from megapipe.config import Config
from megapipe.data.own import OwnData, is_own, own_data
from megapipe.data.prepare import Prepared, prepare
from megapipe.data.tokenizer import Tokenizer
from megapipe.distributed.agreement import all_or_none
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import DataError, MegapipeError
from megapipe.train.changes import Change

PATIENCE = datetime.timedelta(days=7)
"""How long the other processes wait for one of their node to tokenize a corpus."""


def prepare_on_all(
    config: Config, tokenizer: Tokenizer, mesh: ParallelMesh, *, local_rank: int
) -> Prepared | OwnData:
    """The corpus; one process of each node prepares it before the others ask for it.

    Raises a :class:`MegapipeError` of any rank on all of them.
    """
    prepared, error = None, None
    for turn in (local_rank == 0, local_rank != 0):
        if turn:
            try:
                prepared = _corpus(config, tokenizer, progress=mesh.rank == 0)
            except MegapipeError as problem:
                error = problem
        mesh.await_all(PATIENCE)
        all_or_none(mesh, error)
    assert prepared is not None
    if isinstance(prepared, OwnData):
        _compare_ranks(prepared, config.data.source, mesh)
    return prepared


def _corpus(config: Config, tokenizer: Tokenizer, *, progress: bool) -> Prepared | OwnData:
    if is_own(config.data.source):
        return own_data(config, tokenizer)
    return prepare(config.data, tokenizer, progress=progress)


def _compare_ranks(data: OwnData, source: str, mesh: ParallelMesh) -> None:
    """Raise on every rank if the user's code has made another data set on one than on rank 0."""
    error = None
    if data.content != mesh.share(data.content):
        error = DataError(
            f"data.source={source}: rank {mesh.rank} has other samples than rank 0: expected the "
            "same in every process and at every call"
        )
    all_or_none(mesh, error)


def change_of_corpus(
    checkpoint: Checkpoint | None, prepared: Prepared | OwnData, source: str
) -> Change | None:
    """How the corpus `prepared` from `source` differs from the checkpoint's; None where its tokens
    are the same, whatever its name, or there is no checkpoint."""
    if checkpoint is None:
        return None
    manifest = checkpoint.manifest
    stored = manifest.digests
    if prepared.digest == stored.get("corpus") or prepared.content == stored.get("content"):
        return None
    before = f"{manifest.config.get('data.source')} ({stored.get('content', 'unknown')[:8]})"
    return Change("corpus", before, f"{source} ({prepared.content[:8]})")
