"""Train a model: ``torchrun --nproc-per-node 8 train.py configs/quickstart.yaml parallel.tp=2``.

``python train.py --help`` lists every key, ``--help optimizer`` those of a section; ``--dry-run``
prints the plan instead of training.
"""

import sys

from megapipe.train.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
