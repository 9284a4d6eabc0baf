"""Jobs of two nodes with a rank that waits, as long as a test lasts, somewhere before the first
step."""

from __future__ import annotations

from tests.parity.jobs import ROOT, Job, arguments, free_port, tiny

SCRIPT = """
import os, socket, sys, time
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
sys.path.insert(0, {root!r})
from megapipe.launch import rendezvous
from megapipe.train import corpus, job
from megapipe.train.main import main
from megapipe.watch import rank

if "TEST_NODE" in os.environ:
    rank.machine = socket.gethostname = lambda: os.environ["TEST_NODE"]
number, place = int(os.environ["RANK"]), sys.argv.pop(1)

def say(text):
    os.write(1, f"rank {{number}} {{text}}\\n".encode())  # ranks do not write into another's line

def stay(*_, **__):
    say(f"is at the {{place}}")
    time.sleep(600)

open_store = rendezvous.open_store
def meet(*given):
    say("is on its way to the others")
    store = open_store(*given)
    say("has the store")
    return store
rendezvous.open_store = meet

if number == int(sys.argv.pop(1)):
    if place == "corpus":
        corpus.load_sources = stay
    elif place == "tokenizer":
        job.load_tokenizer = stay
    else:
        stay()
main(sys.argv[1:])
"""


class TwoNodes:
    """A job of two nodes; rank `rank` waits at the `place`. That is the `corpus`, the `tokenizer`,
    before the rendezvous, or the `import`, before any heartbeat."""

    def __init__(self, job: Job, place: str, rank: int, **settings: str) -> None:
        self.job = job
        self.script = job.folder / "stays.py"
        self.script.write_text(SCRIPT.format(root=str(ROOT)))
        given = {**tiny(job.folder), **settings}
        self.command = [str(self.script), place, str(rank), *arguments(given)]
        self._rank = rank
        self._place = place

    def by_hand(self) -> None:
        """Start two ranks without a launcher."""
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(2):
            self.job.start(self.command, {**common, "RANK": str(rank), "TEST_NODE": f"node{rank}"})
        self._await(2)

    def launched(self, nproc: int = 1) -> None:
        """Start a launcher on each node, with `nproc` ranks."""
        launch = ["-m", "megapipe.launch", "--nnodes", "2", "--nproc", str(nproc), "--rdzv-id", "a"]
        self._start(launch, nproc)

    def torchrun(self, nproc: int = 1) -> None:
        """Start torchrun on each node, with `nproc` ranks."""
        run = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(nproc)]
        run += ["--rdzv-backend", "c10d", "--rdzv-id", "a"]
        self._start(run, nproc)

    def _start(self, launcher: list[str], nproc: int) -> None:
        port = free_port()
        launcher = [*launcher, "--rdzv-endpoint", f"localhost:{port}"]
        for node in range(2):
            self.job.start([*launcher, *self.command], {"TEST_NODE": f"node{node}"})
            if node == 0:
                self.job.await_store(port)
        self._await(2 * nproc)

    def _await(self, world: int) -> None:
        """Wait until all ranks are where they should wait."""
        for rank in {*range(world)} - {self._rank}:
            there = "is on its way to the others" if self._place == "import" else "has the store"
            self.job.await_text(f"rank {rank} {there}")
        self.job.await_text(f"rank {self._rank} is at the {self._place}")
