"""What all ranks find wrong with a run folder, or with what their nodes have, before a step."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megapipe.checkpoint.run_lock import RunLock
from megapipe.cli import parse
from megapipe.data.tokenizer import load_tokenizer
from megapipe.distributed.mesh import Grid
from megapipe.errors import ConfigError, DataError, LaunchError, MegapipeError
from megapipe.launch.signals import StopRequest
from megapipe.layout.resolve import resolve
from megapipe.testing import World, run_world
from megapipe.train import run_folder
from megapipe.train.trainer import Trainer
from tests.parity.jobs import arguments, tiny

TRAINS = "trains"


def begun(world: World, nodes: list[str], cases: list[dict[str, str]]) -> list[tuple[type, str]]:
    """The error of each run on this rank, which is the first of a node whose current folder is
    `nodes[rank]`; TRAINS if there is none."""
    os.chdir(nodes[world.rank])
    run_folder.HIDDEN_S = 0.2
    seen: list[tuple[type, str]] = []
    for given in cases:
        tokenizer = load_tokenizer("byte")
        config, layout = resolve(parse(arguments(given)).config, world.size, tokenizer.vocab_size)
        mesh = world.mesh(Grid(dp=2))
        try:
            with StopRequest() as stop:
                trainer = Trainer(config, layout, mesh, tokenizer, local_rank=0, stop=stop)
            trainer.close()
            seen.append((type(None), TRAINS))
        except MegapipeError as error:
            seen.append((type(error), str(error)))
    return seen


def test_ranks_refuse_what_is_not_one_run(tmp_path: Path) -> None:
    """A folder that another job has; one that a node does not see; texts that differ by node."""
    given = tiny(tmp_path)
    nodes = [tmp_path / name for name in ("a", "b")]
    for node in nodes:
        node.mkdir()
        shutil.copy(given["data.source"], node / "same.txt")
    text = (tmp_path / "corpus.txt").read_text()
    words = text.split()
    (nodes[0] / "other.txt").write_text(text)
    (nodes[1] / "other.txt").write_text(text.replace("cat", "dog"))
    (nodes[0] / "turned.txt").write_text(" ".join(words))
    (nodes[1] / "turned.txt").write_text(" ".join(reversed(words)))
    own = {**given, "data.cache": "cache"}
    taken = tmp_path / "runs" / "taken"
    taken.mkdir(parents=True)
    lock = RunLock(taken)
    cases = [
        {**given, "run.name": "taken"},
        {**given, "run.folder": "runs"},
        {**own, "data.source": "other.txt"},
        {**own, "data.source": "turned.txt"},
        {**own, "data.source": "same.txt"},
    ]
    ranks = run_world(2, begun, [str(node) for node in nodes], cases)
    lock.release()
    held, unseen, other, turned, same = zip(*ranks, strict=True)
    for kind, text in held:
        assert kind is LaunchError
        assert f"{taken} is in use by process {os.getpid()}" in text
    for kind, text in unseen:
        assert kind is ConfigError
        assert text.startswith("run.folder: rank 1 on")
        assert "a folder that all nodes share" in text
    for (kind, text), name in ((other[0], "other"), (turned[0], "turned"), (turned[1], "turned")):
        assert kind is DataError
        assert text.startswith(f"data.source={name}.txt: rank 1 has other samples than rank 0")
    assert same == ((type(None), TRAINS),) * 2
    assert list(taken.iterdir()) == []
