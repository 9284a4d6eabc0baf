"""The commands as users start them: several processes, one voice, and one end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from megapipe.evaluate.commands import main as evaluate
from megapipe.generate.command import main as generate
from tests.parity.converted import write_checkpoint
from tests.parity.jobs import Job
from tests.parity.launches import run_forked
from tests.parity.reference import init_random
from tests.unit.model.transformers_models import model_of

pytestmark = pytest.mark.full

LAUNCH = ["-m", "megapipe.launch", "--nproc"]
LAYOUT = ["--tp", "2", "--pp", "2"]


def write(folder: Path, *, spoiled: bool = False) -> Path:
    model = model_of("llama_gqa").model_copy(update={"vocab_size": 257, "dtype": "fp32"})
    params = init_random(model, seed=9, dtype=torch.float32)
    if spoiled:
        params["final_norm.weight"].fill_(torch.finfo(torch.float32).max)
    write_checkpoint(folder, model, params)
    return folder


def test_four_processes_say_what_one_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(write(tmp_path / "run")), "--prompt", "ab", "--prompt", "a longer text"]
    given += ["--max-new-tokens", "6", "--json"]
    assert generate(given) == 0
    alone = capsys.readouterr().out
    outcome = run_forked(tmp_path, 4, *given, *LAYOUT, script="scripts/generate.py")
    assert (set(outcome.codes), outcome.text) == ({0}, alone)
    texts = ["perplexity", given[0], "--text", "some text that is longer than its window", "--json"]
    assert evaluate(texts) == 0
    expected = json.loads(capsys.readouterr().out)
    outcome = run_forked(tmp_path, 2, *texts, "--pp", "2", script="scripts/evaluate.py")
    assert set(outcome.codes) == {0}, outcome.text
    assert json.loads(outcome.text) == pytest.approx(expected, rel=1e-5)


def test_an_error_of_one_rank_ends_all_with_one_line(tmp_path: Path) -> None:
    """Logits that are not finite are seen by the last stage alone; prompts by the first rank."""
    folder = str(write(tmp_path / "run", spoiled=True))
    outcome = run_forked(tmp_path, 4, folder, *LAYOUT, script="scripts/generate.py")
    outcome.assert_one_line(6, "logits are not finite")
    outcome = run_forked(
        tmp_path, 2, folder, "--tp", "2", "--prompts", "missing", script="scripts/generate.py"
    )
    outcome.assert_one_line(3, "--prompts missing: No such file")


@pytest.mark.parametrize("by", ["Ctrl-C", pytest.param("a kill of rank 1", marks=pytest.mark.slow)])
def test_all_end_together(by: str, tmp_path: Path) -> None:
    folder = str(write(tmp_path / "run"))
    endless = ["scripts/generate.py", folder, "--pp", "2", "--max-new-tokens", "10000000"]
    with Job(tmp_path) as job:
        launcher = job.start([*LAUNCH, "2", *endless])
        while len(job.text) < 3:
            job.await_text("")
        if by == "Ctrl-C":
            launcher.send_signal(signal.SIGINT)
        else:
            os.kill(job.pids()[1], signal.SIGKILL)
        outcome = job.end()
    assert "Traceback" not in outcome.text
    if by == "Ctrl-C":
        assert outcome.codes == [130]
        assert outcome.text.count(" was interrupted (SIGINT)\n") == 1, outcome.text
    else:
        assert outcome.codes != [0]
        assert outcome.text.count("megapipe: error:") == 1, outcome.text
