"""Where the launchers of several nodes meet, and how many nodes a job may have."""

from __future__ import annotations

from typing import NamedTuple


def is_host(text: str) -> bool:
    """Whether `text` has the form of a host name or address."""
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


class Endpoint(NamedTuple):
    """An address at which launchers of several nodes may meet."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @staticmethod
    def read(text: str) -> list[Endpoint]:
        """Read a list of endpoints such as ``node0:29400,node1:29400``. Raises ValueError."""
        made = []
        for part in text.split(","):
            host, _, port = part.strip().rpartition(":")
            if not is_host(host) or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f"{part.strip()!r} is not HOST:PORT")
            made.append(Endpoint(host.strip("[]"), int(port)))
        return made


class NodeRange(NamedTuple):
    """Range of the number of nodes with which a job may start."""

    least: int = 1
    most: int = 1

    @property
    def elastic(self) -> bool:
        """Whether the job may continue with a different number of nodes."""
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)

    @staticmethod
    def read(text: str) -> NodeRange:
        """Read a range of nodes: ``4`` or ``2:4``. Raises ValueError."""
        least, colon, most = text.partition(":")
        nodes = NodeRange(int(least), int(most if colon else least))
        if not 1 <= nodes.least <= nodes.most:
            raise ValueError(text)
        return nodes
