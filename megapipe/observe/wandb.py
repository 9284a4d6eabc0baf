"""Weights & Biases; imported only when switched on.

Offline runs need no account and no network. The key of an online run comes from the environment
or from ``wandb login``, never from the configuration, and nobody is asked for it.
"""

import contextlib
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from megapipe.observe.record import StepRecord, ValidationRecord
from megapipe.util.answers import call_with_timeout
from megapipe.util.beneath import make_folder, open_no_symlinks
from megapipe.words import without_secrets

INIT_S, FINISH_S = 60.0, 60.0
"""How long the service may take to begin a run, and to take what is left of it at the end."""
_SECRET_KEY = re.compile(r"(^|[._])(key|token|secret|password|credentials?)$")


def public(flat_config: Mapping[str, object]) -> dict[str, object]:
    """The configuration without keys that name a secret, and URLs without theirs."""
    return {
        key: without_secrets(value) if isinstance(value, str) else value
        for key, value in flat_config.items()
        if not _SECRET_KEY.search(key)
    }


class WandbSink:
    """One Weights & Biases run per run folder: a resumed run continues it."""

    name = "wandb"

    def __init__(
        self,
        run_folder: Path,
        *,
        project: str,
        run_name: str,
        mode: Literal["online", "offline"],
        flat_config: Mapping[str, object],
    ) -> None:
        import wandb

        if mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("no API key; set WANDB_API_KEY, or log.wandb=offline")
        make_folder(run_folder, self.name)
        with _public_arguments():
            run = wandb.init(
                project=project,
                name=run_name,
                id=_run_id(run_folder),
                resume="allow",
                dir=run_folder,
                mode=mode,
                config=public(flat_config),
                settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_S),
            )
        run.define_metric("*", step_metric="train/step")
        self._run = run

    def step(self, record: StepRecord) -> None:
        """Log one step's metrics."""
        self._run.log({"train/step": record.step, **record.metrics()})

    def validation(self, record: ValidationRecord) -> None:
        """Log a validation loss."""
        self._run.log({"train/step": record.step, record.metric: record.loss})

    def note(self, text: str) -> None:
        """Put the text into the run's summary as its last note."""
        self._run.summary["note"] = text

    def close(self) -> None:
        """Finish the run, uploading what is left of an online one.

        Raises NoAnswer where that takes too long; the files stay in the run folder, for
        ``wandb sync``.
        """
        call_with_timeout(FINISH_S, self._run.finish)


@contextlib.contextmanager
def _public_arguments() -> Iterator[None]:
    """Has the arguments of this process, which wandb records, without the secrets of URLs."""
    whole = sys.argv
    sys.argv = [*map(without_secrets, whole)]
    try:
        yield
    finally:
        sys.argv = whole


def _run_id(run_folder: Path) -> str:
    """The identity kept in a file, made at the first start."""
    with open_no_symlinks(run_folder, "wandb_id", "a+", encoding="utf-8") as file:
        if not file.tell():
            file.write(uuid.uuid4().hex[:12] + "\n")
        file.seek(0)
        return str(file.read()).strip()
