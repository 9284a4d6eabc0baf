"""Train a model: ``python -m megapipe.launch --nproc 8 train.py configs/quickstart.yaml``.

``python train.py --help`` lists every key, ``--help optimizer`` those of a section. ``--dry-run``
prints the plan instead of training: with ``--gpus 64`` for 64 processes, with ``--device H100`` for
that device, with ``--imbalance 1.5`` for a rank whose experts get 1.5 times the mean rows, with
``--json`` as JSON. ``--time-slices`` times slices of sequences for a plan; ``--traceback`` shows
where an error arose.
"""

import sys

from megapipe.command_line import quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        from megapipe.train.main import main

        sys.exit(main(sys.argv[1:]))
