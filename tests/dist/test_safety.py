"""Files and processes of a job, and what they show to others."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.parity.jobs import ENDLESS, Job, arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.sockets import EVERYWHERE, listening
from tests.parity.tiers import in_parts

SECRETS = {
    name: f"canary-{number}-of-a-secret"
    for number, name in enumerate(
        ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NETRC", "MY_PASSWORD")
    )
}


@in_parts("loss", ["null", "own:loss"], full=2)
def test_no_file_of_a_run_has_a_secret_of_the_environment(loss: str, tmp_path: Path) -> None:
    """Nor what it prints, with all its reports, whether it ends well or crashes."""
    (tmp_path / "own.py").write_text("def loss(a, b, c): raise ValueError('no')\n")
    given = {
        **tiny(tmp_path),
        "train.loss_function": loss,
        "log.timeline": "[2]",
        "log.profile": "[2]",
        "log.sample_ids": "true",
        "log.tensorboard": "true",
        "log.wandb": "offline",
    }
    outcome = run_forked(tmp_path, 2, *arguments(given), "--traceback", environ=SECRETS)
    assert outcome.codes == ([0, 0] if loss == "null" else [2, 2]), outcome.text
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    for secret in SECRETS.values():
        assert secret not in outcome.text
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.full
@pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="processes are not listed there"
)
def test_what_processes_of_a_job_show(tmp_path: Path) -> None:
    """Launcher, ranks and the monitor beside them: no secret of the environment, as every user of
    the machine may list them, and no socket that other machines could reach."""
    launch = ["-m", "megapipe.launch", "--nproc", "2", "--max-restarts", "1", "train.py"]
    with Job(tmp_path) as job:
        launcher = job.start([*launch, *arguments({**tiny(tmp_path), **ENDLESS})], SECRETS)
        job.await_text("| loss")
        pids = list(job.alive())
        shown = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
        open_at = set().union(*map(listening, pids))
        launcher.send_signal(signal.SIGTERM)
        assert job.end().codes == [75]
    assert len(pids) >= 4
    for secret in SECRETS.values():
        assert secret.encode() not in shown
    assert open_at
    assert not open_at & EVERYWHERE
