"""A process that tokenizes, as :mod:`~megapipe.data.prepare.workers` starts it."""

import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

LOOK_S = 0.5
"""Time between two looks at the process that started this one."""


def work(connection: Connection) -> None:
    """Do one job after another, until the connection is closed."""
    # here, as it takes seconds, in which the process that started this one may end
    from megapipe.data.prepare.encode import encode, prefix_of
    from megapipe.errors import MegapipeError

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        tokenizer, folder = connection.recv()
        while True:
            number, part = connection.recv()
            try:
                outcome: Any = encode(part, tokenizer, prefix_of(folder, number))
            except (MegapipeError, OSError) as error:
                outcome = error
            except BaseException:
                outcome = RuntimeError(f"part {number}: {traceback.format_exc()}")
            connection.send(outcome)
    except (EOFError, ConnectionError):
        return


def main() -> None:
    """Work for the process that the first argument names, at the other end of the socket that the
    second one names, and end with it, in the middle of a part too."""
    parent, connection = map(int, sys.argv[1:3])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    work(Connection(connection))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)
