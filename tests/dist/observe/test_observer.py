"""Modules that sinks load, and Weights & Biases, which starts a process of its own."""

import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from megapipe.observe import Observer, build_sinks
from tests.parity.observed import VALIDATION, wandb_config


def test_nothing_heavy_is_imported_until_it_is_switched_on():
    program = (
        "import sys, megapipe.observe; "
        "print([name for name in ('torch', 'wandb', 'tensorboard') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


@pytest.mark.full
def test_wandb_offline_needs_no_account(tmp_path, wandb_home, make_record):
    for step in (7, 8):  # the second time as a resumed run
        observer = build_sinks(wandb_config("offline"), tmp_path, {"run.seed": 31337})
        observer.step(make_record(step=step))
        observer.validation(VALIDATION)
        observer.note("saved")
        observer.close()
    run_id = (tmp_path / "wandb_id").read_text().strip()
    files = list((tmp_path / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert files
    content = b"".join(path.read_bytes() for path in files)
    for expected in (b"train/loss", b"validation/loss", b"run.seed", b"31337", b"first"):
        assert expected in content


def test_wandb_online_without_a_key_warns_and_trains_on(
    tmp_path, wandb_home, make_record, capsys, caplog
):
    observer = build_sinks(wandb_config("online"), tmp_path, {})
    observer.step(make_record())
    observer.close()
    assert "step   7/300" in capsys.readouterr().out
    assert "no API key" in caplog.text


def test_a_service_that_never_answers_is_not_waited_for(
    tmp_path, wandb_home, make_record, monkeypatch, capsys, caplog
):
    """Neither at the beginning nor at the end."""
    import wandb

    from megapipe.observe import wandb as sink

    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{mute.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setattr(wandb, "login", lambda **_: True)  # it has a time-out of its own
        monkeypatch.setattr(sink, "INIT_S", 1.0)
        began = time.monotonic()
        observer = build_sinks(wandb_config("online"), tmp_path, {})
        assert time.monotonic() - began < 30
    observer.step(make_record())
    assert "step   7/300" in capsys.readouterr().out
    assert "wandb does not accept records, training continues" in caplog.text

    caplog.clear()
    monkeypatch.setattr(sink, "FINISH_S", 0.1)
    begun = sink.WandbSink.__new__(sink.WandbSink)
    begun._run = SimpleNamespace(finish=threading.Event().wait)
    Observer([begun]).close()
    assert "no answer in 0.1 s" in caplog.text
