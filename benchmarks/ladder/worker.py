"""One measurement in a separate process: ``python -m ladder.worker '{"job": ..., ...}'``.

If memory runs out, or the process crashes, only its remaining measurements are lost: the known ones
are on disk already.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from ladder.ablations import ablations
from ladder.bench import Bench, Work
from ladder.whole_steps import ours, peer


def main(argv: Sequence[str]) -> None:
    work = Work(**json.loads(argv[0]))
    if work.device == "cpu":
        torch.set_num_threads(1)
    {"ours": ours, "peer": peer, "ablations": ablations}[work.job](Bench(work))


if __name__ == "__main__":
    main(sys.argv[1:])
