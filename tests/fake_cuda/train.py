"""Runs ``train.py`` on the device of type cuda; a launcher gets this file instead.

    python -m megapipe.launch --nproc 8 tests/fake_cuda/train.py configs/quickstart.yaml ...

Variables: FAKE_CUDA_LIBRARY is the library. Into the folder FAKE_CUDA_REPORTS each process writes
what its device has noted (:class:`tests.fake_cuda.world.Report`), in a file of its rank, even if it
fails. FAKE_CUDA_VISIBLE has a word for each process, which becomes its CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    sys.path[0] = str(ROOT)
    from tests.fake_cuda import device

    rank = int(os.environ.get("RANK", "0"))
    if visible := os.environ.get("FAKE_CUDA_VISIBLE"):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split()[rank]
    own = device.install(Path(os.environ["FAKE_CUDA_LIBRARY"]))
    from megapipe.train.main import train
    from tests.fake_cuda import nccl
    from tests.fake_cuda.ledger import Ledger
    from tests.fake_cuda.world import Report

    ledger = Ledger(rank)
    nccl.install(own, ledger)
    code = train(sys.argv[1:])
    gc.collect()
    noted = own.report()
    report = Report(ledger, noted["faults"], noted["host_waits"])
    Path(os.environ["FAKE_CUDA_REPORTS"], f"{rank}.pickle").write_bytes(pickle.dumps(report))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as train.py ends


if __name__ == "__main__":
    main()
