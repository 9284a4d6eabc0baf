"""A tokenizer of the hub is fetched once for all ranks of a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked
from tests.unit.data.data_cases import train_bpe

TRAIN = """
import os
import sys
import time
from pathlib import Path

import huggingface_hub
import transformers

HERE = Path(__file__).parent
FETCHED = HERE / "fetched"


def note(what):
    with (HERE / "asked").open("a") as file:
        file.write(f"{what} {os.environ['RANK']}\\n")


class Hub:
    def repo_info(self, name, **options):
        note("whether it is there")


def from_pretrained(name, *, trust_remote_code, local_files_only):
    assert name == "somebody/tokenizer"
    if not local_files_only:
        note("for it")
        time.sleep(1.0)  # whoever does not wait finds nothing meanwhile
        FETCHED.touch()
    if not FETCHED.exists():
        raise OSError("no local copy")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(HERE / "tokenizer.json"), eos_token="</s>"
    )


huggingface_hub.HfApi = Hub
transformers.AutoTokenizer.from_pretrained = from_pretrained

from megapipe.train.main import main

sys.exit(main(sys.argv[1:]))
"""
"""Program: train.py where the hub, and its cache of this host, are files beside it."""


@pytest.mark.full
def test_one_rank_of_a_host_asks_the_hub(tmp_path: Path) -> None:
    """The other one finds what it has fetched."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    train_bpe(["</s>"], 320).save(str(tmp_path / "tokenizer.json"))
    wanted = {"data.tokenizer": "somebody/tokenizer", "train.steps": "2", "parallel.dp": "2"}
    outcome = run_forked(tmp_path, 2, *arguments({**tiny(tmp_path), **wanted}), script=str(script))
    assert outcome.codes == [0, 0], outcome.text
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked in [[f"whether it is there {rank}", f"for it {rank}"] for rank in (0, 1)]
