"""What all ranks find wrong with a run folder, or with what their nodes have, before a step."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megapipe.checkpoint.run_lock import RunLock
from megapipe.cli import parse
from megapipe.data.stored import write_checksums
from megapipe.data.tokenizer import load_tokenizer
from megapipe.data.tokens import TokenWriter
from megapipe.data.tokens.format import token_type
from megapipe.distributed.mesh import Grid
from megapipe.errors import ConfigError, DataError, MegapipeError
from megapipe.launch.signals import StopRequest
from megapipe.layout.resolve import resolve
from megapipe.testing import World, run_world
from megapipe.train import run_folder
from megapipe.train.trainer import Trainer
from tests.parity.bad_input.places import MPI, SLURM
from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.tiers import in_parts
from tests.unit.data.data_cases import train_bpe

TRAINS = "trains"


def begun(world: World, nodes: list[str], cases: list[dict[str, str]]) -> list[tuple[type, str]]:
    """Return the error of each run on this rank, or TRAINS if there is none. The rank is the first
    of a node whose current folder is `nodes[rank]`."""
    os.chdir(nodes[world.rank])
    run_folder.HIDDEN_S = 0.2
    seen: list[tuple[type, str]] = []
    for given in cases:
        asked = parse(arguments(given)).config
        tokenizer = load_tokenizer(asked.data.tokenizer)
        config, layout = resolve(asked, world.size, tokenizer.vocab_size)
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
    """A folder that another job has; one that a node does not see; texts, tokenizers or token files
    that differ by node, these between the places that are always looked at."""
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
    for node, specials in zip(nodes, (["</s>", "<s>"], ["<s>", "</s>"]), strict=True):
        train_bpe(specials).save(str(node / "end.json"))
        with TokenWriter(node / "ids", token_type(257)) as writer:
            for first in range(50):
                writer.add(np.arange(first, first + 40))
    for node, odd in zip(nodes, (3, 4), strict=True):
        with TokenWriter(node / "long", token_type(257)) as writer:
            writer.add(np.concatenate([np.arange(1500), [odd], np.arange(198_500)]) % 250)
        write_checksums(node / "long.bin")
    own = {**given, "data.cache": "cache"}
    taken = tmp_path / "runs" / "taken"
    taken.mkdir(parents=True)
    lock = RunLock(taken)
    cases = [
        {**given, "run.name": "taken"},
        {**given, "run.folder": "runs"},
        {**own, "data.source": "other.txt"},
        {**own, "data.source": "turned.txt"},
        {**own, "data.source": "ids", "data.tokenizer": "end.json"},
        {**own, "data.source": "long"},
        {**own, "data.source": "same.txt"},
        {**own, "data.source": "ids"},
    ]
    ranks = run_world(2, begun, [str(node) for node in nodes], cases)
    lock.release()
    held, unseen, other, turned, end, long, *same = zip(*ranks, strict=True)
    for kind, text in held:
        assert kind is ConfigError
        assert f"{taken} is in use by process {os.getpid()}" in text
    for kind, text in unseen:
        assert kind is ConfigError
        assert text.startswith("run.folder: rank 1 on")
        assert "a folder that all nodes share" in text
    differ = [(other[0], "other.txt"), *((each, "turned.txt") for each in turned)]
    for (kind, text), name in (*differ, *((each, "long") for each in long)):
        assert kind is DataError
        assert text.startswith(f"data.source={name}: rank 1 has other samples than rank 0")
    for kind, text in end:
        assert kind is DataError
        assert text.startswith("data.tokenizer=end.json: rank 1 has another tokenizer than rank 0")
    assert same == [((type(None), TRAINS),) * 2] * 2
    assert list(taken.iterdir()) == []


@pytest.mark.parametrize(
    "places",
    [
        pytest.param(MPI, id="mpirun", marks=pytest.mark.full),
        pytest.param(SLURM, id="srun", marks=pytest.mark.slow),
    ],
)
def test_processes_of_mpirun_and_srun_are_one_run(
    places: dict[str, str | None], tmp_path: Path
) -> None:
    """Their variables are enough: none of them trains the whole model alone."""
    outcome = run_forked(tmp_path, 2, *arguments(tiny(tmp_path)), places=places)
    assert outcome.codes == [0, 0], outcome.text
    assert outcome.text.count(" 2 processes on cpu with gloo ") == 1, outcome.text
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"run", "latest"}


@in_parts("linked", ["runs", "runs/run"], full=["runs/run"])
def test_a_run_follows_the_link_that_it_is_and_none_within(linked: str, tmp_path: Path) -> None:
    """Reports that meet one are left out, and the run goes on; what is outside stays as it was."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / linked).parent.mkdir(exist_ok=True)
    (tmp_path / linked).symlink_to(disk)
    run = tmp_path / "runs/run"
    meets = ["timeline/step_000002.json", "profile/step_000002/rank_0001.json.gz"]
    for name in meets:
        (run / name).parent.mkdir(parents=True)
        (run / name).symlink_to(outside)
    given = {
        **tiny(tmp_path),
        "log.timeline": "[2]",
        "log.profile": "[2]",
        "log.sample_ids": "true",
    }
    outcome = run_forked(tmp_path, 2, *arguments(given))
    assert outcome.codes == [0, 0], outcome.text
    assert outcome.text.count("is a symbolic link, through which a run does not write") == 2
    assert "no timeline of step 2: " in outcome.text
    assert "no complete profile of step 2: rank 1: " in outcome.text
    assert outside.read_text() == "mine"
    made = disk / "run" if linked == "runs" else disk
    assert (made / "summary.json").exists()
    assert (made / "samples/001-after-0/rank-00000.jsonl").exists()
