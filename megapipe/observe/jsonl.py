"""``log.jsonl``: one JSON object per line, in the folder of every run.

Each object has ``kind`` (``step``, ``validation`` or ``note``), ``time`` (seconds since 1970) and
the fields of a :class:`~megapipe.observe.record.StepRecord` or
:class:`~megapipe.observe.record.ValidationRecord`; a ``note`` has ``text``. A value that is not
finite is null. A resumed run appends to the file: a repeated step occurs twice, and its later line
is the valid one.
"""

import contextlib
import errno
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from megapipe.observe.record import StepRecord, ValidationRecord, finite_fields
from megapipe.util.no_symlinks import open_no_symlinks

_LONGEST_LINE = 2**20  # bytes


class JsonlSink:
    """Appends to a file that contains only complete lines.

    Each line is one unbuffered write to the operating system, so a killed process loses no line. An
    incomplete line, left by an interrupted or failed write, is cut off.
    """

    name = "log.jsonl"

    def __init__(self, path: Path) -> None:
        self._file = open_no_symlinks(path.parent, path.name, "a+b", buffering=0)
        self._keep(self._end_of_last_line())

    def step(self, record: StepRecord) -> None:
        """Append a step; raises OSError if it cannot be written."""
        self._write("step", finite_fields(record))

    def validation(self, record: ValidationRecord) -> None:
        """Append a validation; raises OSError if it cannot be written."""
        self._write("validation", finite_fields(record))

    def note(self, text: str) -> None:
        """Append a line of text; raises OSError if it cannot be written."""
        self._write("note", {"text": text})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, kind: str, fields: Mapping[str, object]) -> None:
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **fields}) + "\n"
        data = line.encode()
        start = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._keep(start)
            raise

    def _end_of_last_line(self) -> int:
        size = os.fstat(self._file.fileno()).st_size
        start = max(0, size - _LONGEST_LINE)
        return start + os.pread(self._file.fileno(), size - start, start).rfind(b"\n") + 1

    def _keep(self, size: int) -> None:
        """Truncate the file to `size` bytes; does nothing for a pipe or a device."""
        with contextlib.suppress(OSError):
            self._file.truncate(size)
