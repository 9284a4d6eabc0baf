"""Train a model: ``torchrun --nproc-per-node 8 train.py configs/quickstart.yaml parallel.tp=2``.

``python train.py --help`` lists every key, ``--help optimizer`` those of a section; ``--dry-run``
prints the plan instead of training.
"""

import contextlib
import os
import sys

from megapipe import cli
from megapipe.errors import MegapipeError
from megapipe.train import ending, job, launch


def main(argv: list[str]) -> int:
    place = launch.Place()
    try:
        place = launch.find_place(os.environ)
        command = cli.parse(argv)
        if command.help is not None:
            if place.rank == 0:
                cli.show(cli.help_text(command.help))
            return 0
        return job.run(command, place)
    except MegapipeError as error:
        return ending.end_early(error, place)
    except KeyboardInterrupt:
        return 130


def leave(code: int) -> None:
    """End at once: threads of torch and of loggers must not hold up or change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by the reader
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    # torch's C++ side shows a stack trace of what is reported here in one line
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    leave(main(sys.argv[1:]))
