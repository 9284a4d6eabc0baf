"""One measurement in a process of its own: ``python -m ladder.worker '{"job": ..., ...}'``.

Running out of memory, or a crash, loses what this process had still to measure and no more: what
is known is on disk already.
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
