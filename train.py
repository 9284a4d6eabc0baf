"""Train a model: ``torchrun --nproc-per-node 8 train.py configs/quickstart.yaml parallel.tp=2``.

``python train.py --help`` lists every key; ``--dry-run`` prints the plan instead of training.
"""

import os
import sys

from megapipe import cli
from megapipe.errors import MegapipeError
from megapipe.train import job, launch


def main(argv: list[str]) -> int:
    place = launch.Place()
    try:
        place = launch.find_place(os.environ)
        command = cli.parse(argv)
        if command.help:
            if place.rank == 0:
                print(cli.help_text(), end="")
            return 0
        return job.run(command, place)
    except MegapipeError as error:
        return launch.report(error, place, None)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
