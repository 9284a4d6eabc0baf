"""torch's flight recorder: a record of the last collectives and messages of this process."""

from __future__ import annotations

import json
from typing import Any

from torch._C import _distributed_c10d as c10d


def flight_record() -> bytes | None:
    """Return torch's record of started and completed operations, as JSON; None if there is none.

    The environment variable ``TORCH_FR_BUFFER_SIZE`` sets how many operations torch records.
    """
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump: Any = getattr(c10d, name, None)
        if dump is not None:
            record: bytes = dump()
            if json.loads(record).get("entries"):
                return record
    return None
