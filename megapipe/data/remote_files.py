"""Files of a store or a web server, found and read by requests that are repeated.

fsspec's own `glob`, `find`, `isfile` and `isdir` take a listing that fails for one of nothing, so
that a server that is down for a moment has fewer files. Here they rest on :meth:`RemoteFiles.ls`
and :meth:`RemoteFiles.info`, which know an absence from a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from fsspec.spec import AbstractFileSystem

from megapipe.util.retries import Failed, ask, unless_absent

LISTING_S = 600.0
"""Seconds for the answer to one call that lists a folder, which may make many requests."""
T = TypeVar("T")


class RemoteFiles(AbstractFileSystem):
    """Files of `system`, an fsspec file system. All methods raise
    :class:`~megapipe.util.retries.Failed` for a failure, and FileNotFoundError for what is not
    there."""

    cachable = False

    def __init__(self, system: Any) -> None:
        super().__init__()
        self._system = system

    def _strip_protocol(self, path: str) -> Any:  # a class method of others
        return self._system._strip_protocol(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List a folder."""
        listed: list[Any] = _asked(
            f"list {path}", lambda: list(self._system.ls(path, detail=detail)), LISTING_S
        )
        return listed

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return size, kind and version of a file or a folder, by the system's own names."""
        return _asked(f"look for {path}", lambda: dict(self._system.info(path)))

    def has(self, path: str, kind: Literal["file", "directory"]) -> bool:
        """Whether there is a file, or a folder, of this name."""
        return unless_absent(lambda: bool(self.info(path)["type"] == kind), False)

    def blocks(self, path: str, size: int | None, nbytes: int) -> Iterator[bytes]:
        """Yield a file of `size` bytes, if that is known, in blocks of up to `nbytes`; after a
        failure it goes on where it was."""
        at = 0
        usable: list[Any] = []  # a file whose last read has come back; one that failed has an end

        def read() -> tuple[Any, bytes]:
            file = usable.pop() if usable else self._open_at(path, at, nbytes)
            block = file.read(nbytes)
            if not block and size is not None and at < size:
                raise OSError(f"{at} bytes came, of {size}")
            return file, block

        while True:
            file, block = _asked(f"read {path}", read)
            if not block:
                file.close()
                return
            usable.append(file)
            at += len(block)
            yield block

    def _open_at(self, path: str, at: int, nbytes: int) -> Any:
        """Open a file at byte `at`."""
        file = self._system.open(path, "rb")
        try:
            file.seek(at)
        except ValueError:  # of a server that gives no ranges
            while at:
                at -= len(file.read(min(at, nbytes)))
        return file


def _asked(doing: str, work: Callable[[], T], answer_s: float | None = None) -> T:
    try:
        return ask(doing, work, answer_s=answer_s)
    except Failed as failed:
        if isinstance(failed.cause, FileNotFoundError):
            raise failed.cause from None
        raise
