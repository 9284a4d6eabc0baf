"""The corpus of a run on all of its processes, and whether it is the checkpoint's."""

from __future__ import annotations

import datetime

from megapipe.checkpoint.reader import Checkpoint
from megapipe.config import Config
from megapipe.data.dataset import Corpus
from megapipe.data.given import given_tokens, is_given
from megapipe.data.own import is_own, own_data
from megapipe.data.prepare import prepare
from megapipe.data.tokenizer import Tokenizer
from megapipe.distributed.agreement import all_or_none
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import DataError, MegapipeError
from megapipe.train.changes import Change

PATIENCE = datetime.timedelta(days=7)
"""How long the other processes wait for one of their node to tokenize a corpus."""


def prepare_on_all(
    config: Config, tokenizer: Tokenizer, mesh: ParallelMesh, *, local_rank: int
) -> Corpus:
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
    _compare_ranks(prepared, config.data.source, mesh)
    return prepared


def _corpus(config: Config, tokenizer: Tokenizer, *, progress: bool) -> Corpus:
    if is_own(config.data.source):
        return own_data(config, tokenizer)
    if is_given(config.data.source):
        return given_tokens(config.data)
    return prepare(config.data, tokenizer, progress=progress)


def _compare_ranks(data: Corpus, source: str, mesh: ParallelMesh) -> None:
    """Raise on every rank if one has another data set than rank 0: the user's code has made
    another, or its node has another file of that name."""
    error = None
    if data.content != mesh.share(data.content):
        error = DataError(
            f"data.source={source}: rank {mesh.rank} has other samples than rank 0: expected the "
            "same in every process and at every call"
        )
    all_or_none(mesh, error)


def change_of_corpus(checkpoint: Checkpoint | None, prepared: Corpus, source: str) -> Change | None:
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
