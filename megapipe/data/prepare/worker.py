"""A process that tokenizes, as :mod:`~megapipe.data.prepare.workers` starts it."""

import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from megapipe.data.prepare.encode import encode, prefix_of
from megapipe.errors import MegapipeError


def work(connection: Connection) -> None:
    """Do one job after another, until the connection is closed."""
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
    """Work for the process at the other end of the socket that the first argument names."""
    work(Connection(int(sys.argv[1])))
