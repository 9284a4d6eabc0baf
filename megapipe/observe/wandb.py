"""The Weights & Biases sink; imported only when switched on.

Offline runs need no account and no network. The key of an online run comes from the environment or
from ``wandb login``, never from the configuration or a prompt.
"""

import contextlib
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from megapipe.observe.record import StepRecord, ValidationRecord
from megapipe.text import without_secrets
from megapipe.util.no_symlinks import make_folder, open_no_symlinks
from megapipe.util.timeouts import call_with_timeout

INIT_S, FINISH_S = 60.0, 60.0
"""Time limits in seconds: for the service to begin a run, and for the upload at the end."""
_SECRET_KEY = re.compile(r"(^|[._])(key|token|secret|password|credentials?)$")


def public(flat_config: Mapping[str, object]) -> dict[str, object]:
    """Return the configuration without keys of secrets, and with secrets removed from URLs."""
    return {
        key: without_secrets(value) if isinstance(value, str) else value
        for key, value in flat_config.items()
        if not _SECRET_KEY.search(key)
    }


class WandbSink:
    """Writes to one Weights & Biases run per run folder; a resumed run continues the same one."""

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
            raise RuntimeError("no API key: set WANDB_API_KEY, or log.wandb=offline")
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
        """Put a line of text into the run's summary; it replaces the previous line."""
        self._run.summary["note"] = text

    def close(self) -> None:
        """Finish the run, which uploads the rest of an online run.

        Raises NoAnswer if the upload takes too long; the files stay in the run folder, for ``wandb
        sync``.
        """
        call_with_timeout(FINISH_S, self._run.finish)


@contextlib.contextmanager
def _public_arguments() -> Iterator[None]:
    """Hide the secrets of URLs in this process's arguments, which wandb records."""
    whole = sys.argv
    sys.argv = [*map(without_secrets, whole)]
    try:
        yield
    finally:
        sys.argv = whole


def _run_id(run_folder: Path) -> str:
    """Return the run's id in Weights & Biases, which is kept in a file since the first start."""
    with open_no_symlinks(run_folder, "wandb_id", "a+", encoding="utf-8") as file:
        if not file.tell():
            file.write(uuid.uuid4().hex[:12] + "\n")
        file.seek(0)
        return str(file.read()).strip()
