"""Where the launchers of several nodes meet, and how many of them there are to be."""

from __future__ import annotations

from typing import NamedTuple


def is_host(text: str) -> bool:
    """Whether a text has the form of a host's name or address."""
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


class Endpoint(NamedTuple):
    """Where nodes may meet."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @staticmethod
    def read(text: str) -> list[Endpoint]:
        """Those of a list such as ``node0:29400,node1:29400``. Raises ValueError."""
        made = []
        for part in text.split(","):
            host, _, port = part.strip().rpartition(":")
            if not is_host(host) or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f"{part.strip()!r} is no HOST:PORT")
            made.append(Endpoint(host.strip("[]"), int(port)))
        return made


class NodeRange(NamedTuple):
    """With how many nodes a job may be started."""

    least: int = 1
    most: int = 1

    @property
    def elastic(self) -> bool:
        """Whether it may go on with another number than before."""
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)

    @staticmethod
    def read(text: str) -> NodeRange:
        """Of ``4`` or ``2:4``. Raises ValueError."""
        least, colon, most = text.partition(":")
        nodes = NodeRange(int(least), int(most if colon else least))
        if not 1 <= nodes.least <= nodes.most:
            raise ValueError(text)
        return nodes
