"""Addresses on which processes listen, as the system reports them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

EVERYWHERE = {8 * "0", 32 * "0"}
"""All interfaces, of IPv4 and of IPv6."""


def listening(pid: int) -> set[str]:
    """Return the addresses, in hexadecimal, on which a process listens."""
    sockets = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            sockets.add(os.readlink(file))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        row[1].partition(":")[0]
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    }
