"""Tokenization of a corpus's shards by several processes; finished shards are kept. The result does
not depend on the number or speed of the processes."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from megapipe.data.corpus import CorpusShard
from megapipe.data.prepare.encode import Summary, encode, finished, prefix_of
from megapipe.data.tokenizer import Encoder
from megapipe.errors import DataError
from megapipe.util.process_pool import ProcessPool, WorkerDied, cores

Step = Callable[[CorpusShard, Summary, bool], None]
"""Function called with each finished shard, its summary, and whether it existed before."""
Job = tuple[int, CorpusShard]
"""Number of a shard, and the shard."""


def encode_all(
    parts: Iterable[CorpusShard], tokenizer: Encoder, folder: Path, workers: int | None, step: Step
) -> int:
    """Tokenize all shards into `folder`, and return their number. If there is only one shard, this
    process tokenizes it.

    Args:
        workers: number of processes; None: one for each core.
        step: called with each finished shard.

    Raises:
        DataError: the corpus cannot be read, or a process has died.
        OSError: the folder cannot be written.
    """
    numbered = enumerate(parts)
    first = list(islice(numbered, 2))
    count = 0

    def missing() -> Iterator[Job]:
        nonlocal count
        for number, part in chain(first, numbered):
            count += 1
            summary = finished(prefix_of(folder, number), part)
            if summary is None:
                yield number, part
            else:
                step(part, summary, True)

    if len(first) < 2:
        for number, part in missing():
            step(part, encode(part, tokenizer, prefix_of(folder, number)), False)
        return count
    with ProcessPool[Job, Summary](workers or cores(), _encode, tokenizer, folder) as pool:
        try:
            for (_, part), summary in pool.run(missing()):
                step(part, summary, False)
        except WorkerDied as died:
            raise DataError(_death(died)) from None
    return count


def _encode(tokenizer: Encoder, folder: Path, job: Job) -> Summary:
    """Tokenize a shard in a process of the pool."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    number, part = job
    return encode(part, tokenizer, prefix_of(folder, number))


def _death(died: WorkerDied) -> str:
    """Describe the end of a process."""
    number, _ = died.job
    hint = ""
    if died.code == -signal.SIGKILL:
        hint = (
            ": it was killed, perhaps because memory ran out; fewer data.tokenizer_workers need "
            "less"
        )
    return (
        f"a tokenizer process died while it tokenized shard {number}; exit code {died.code}{hint}"
    )
