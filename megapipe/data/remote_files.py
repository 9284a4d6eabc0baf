"""Files of an object store or a web server, listed and read with requests that are retried.

If a listing fails, fsspec's own `glob`, `find`, `isfile` and `isdir` take it as empty, so a server
that is down for a moment seems to have fewer files. Here they use :meth:`RemoteFiles.ls` and
:meth:`RemoteFiles.info`, which distinguish a missing file from a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from fsspec.spec import AbstractFileSystem

from megapipe.util.retries import Failed, ask, unless_absent

LISTING_S = 600.0
"""Time limit in seconds for a call that lists a folder, which may make many requests."""
T = TypeVar("T")


class RemoteFiles(AbstractFileSystem):
    """File system that retries the requests of `system`, another fsspec file system. All methods
    raise :class:`~megapipe.util.retries.Failed` for a failure, and FileNotFoundError for a missing
    file."""

    cachable = False

    def __init__(self, system: Any) -> None:
        super().__init__()
        self._system = system

    def _strip_protocol(self, path: str) -> Any:  # a class method in other file systems
        return self._system._strip_protocol(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Return the names of a folder's content, or with `detail` the file system's descriptions
        as :meth:`info` returns them."""
        listed: list[Any] = _asked(
            f"list {path}", lambda: list(self._system.ls(path, detail=detail)), LISTING_S
        )
        return listed

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return size, kind and version of a file or a folder, under the file system's own keys."""
        return _asked(f"look for {path}", lambda: dict(self._system.info(path)))

    def has(self, path: str, kind: Literal["file", "directory"]) -> bool:
        """Whether a file, or a folder, exists at `path`."""
        return unless_absent(lambda: bool(self.info(path)["type"] == kind), False)

    def blocks(self, path: str, size: int | None, nbytes: int) -> Iterator[bytes]:
        """Yield the content of a file of `size` bytes (None: unknown) in blocks of up to `nbytes`.
        After a failed request, reading continues at the same byte."""
        at = 0
        usable: list[Any] = []  # files whose last read succeeded

        def read() -> tuple[Any, bytes]:
            file = usable.pop() if usable else self._open_at(path, at, nbytes)
            block = file.read(nbytes)
            if not block and size is not None and at < size:
                raise OSError(f"{at} bytes arrived, of {size}")
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
        except ValueError:  # the server does not support ranges
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
