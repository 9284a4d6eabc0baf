"""Jobs of two nodes of which a rank prepares the corpus for as long as a test lasts, or comes late
to the meeting of all."""

from __future__ import annotations

import time

from tests.parity.jobs import ROOT, Job, arguments, free_port, tiny

SCRIPT = """
import os, sys, time
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
sys.path.insert(0, {root!r})
import megapipe.data.build, megapipe.data.sources
from megapipe.launch import rendezvous
from megapipe.train import corpus
from megapipe.train.main import main
from megapipe.watch import rank

rank.machine = lambda: os.environ["TEST_NODE"]
number, at = int(os.environ["RANK"]), sys.argv.pop(1)

def stay(*_, **__):
    os.write(1, f"rank {{number}} is at the {{at}}\\n".encode())
    time.sleep(600)

if number == int(sys.argv.pop(1)):
    if at == "corpus":
        corpus.load_sources = stay
    elif at == "tokenizer":
        from megapipe.train import job
        job.load_tokenizer = stay
    else:
        stay()
main(sys.argv[1:])
"""


class TwoNodes:
    """A job of two nodes, of which rank `rank` stays at the `place`: the `corpus`, the `tokenizer`,
    which is before all have met, or the `import`, before it has given any sign of life."""

    def __init__(self, job: Job, place: str, rank: int, **settings: str) -> None:
        self.job = job
        script = job.folder / "stays.py"
        script.write_text(SCRIPT.format(root=str(ROOT)))
        self._command = [
            str(script),
            place,
            str(rank),
            *arguments({**tiny(job.folder), **settings}),
        ]
        self._text = f"rank {rank} is at the {place}"

    def by_hand(self) -> None:
        """Two ranks that no launcher has started."""
        port = str(free_port())
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(2):
            environ = {**common, "RANK": str(rank), "TEST_NODE": f"node{rank}"}
            self.job.start(self._command, environ)
        self.job.await_text(self._text)

    def launched(self, nproc: int = 1) -> None:
        """By a launcher on each."""
        launch = ["-m", "megapipe.launch", "--nnodes", "2", "--nproc", str(nproc), "--rdzv-id", "a"]
        launch += ["--rdzv-endpoint", f"localhost:{free_port()}"]
        for node in range(2):
            self.job.start([*launch, *self._command], {"TEST_NODE": f"node{node}"})
            if node == 0:
                time.sleep(1.0)  # the first hosts the store
        self.job.await_text(self._text)
