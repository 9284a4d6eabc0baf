"""Checkpoints on object storage, with any protocol that fsspec knows.

A store cannot rename folders, so the object ``manifest.json`` is the commit: it is written last and
contains its own digest, and a folder without a manifest is not a checkpoint. Each attempt writes
into a folder with a unique name from the start. So no two attempts share an object, even if one of
the jobs was taken for dead.

A failed request is retried for `patience_s` seconds (:mod:`megapipe.util.retries`). If a request
fails while a shard file is written, the retry writes the file from its beginning. Listings are
never cached, as other processes write into the same folders.
"""

from __future__ import annotations

import contextlib
import functools
import io
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeVar, cast

from megapipe.checkpoint.names import MANIFEST
from megapipe.errors import CheckpointError, StorageError
from megapipe.text import one_line
from megapipe.util.retries import LIMIT_S, Failed, Operation, unless_absent
from megapipe.util.urls import check_folder

DISCARD_S = 10.0
"""Maximum seconds for removing the folder of a failed save; the next start removes the rest."""
PART_BYTES = 1 << 25
"""Bytes per part of a multipart upload; one part is in memory while an object is written."""
AHEAD_BYTES = 1 << 24
"""Bytes per read request if the caller has named the byte up to which it reads the object."""
AT_ONCE = 500
"""Maximum number of objects that one request removes."""
T = TypeVar("T")


@dataclass(frozen=True)
class ObjectStore:
    """An fsspec file system, and the seconds for which a failed request is retried."""

    system: Any
    patience_s: float


@dataclass(frozen=True, order=True)
class RemotePath:
    """An object, or a folder: all objects whose keys begin with the same path. It has the
    operations of :class:`~megapipe.checkpoint.storage.StoragePath`."""

    url: str
    store: ObjectStore = field(compare=False, repr=False)
    most_readers = 1
    """Maximum number of threads that read: one, as not all fsspec file systems are thread-safe."""

    @classmethod
    def of(cls, url: str, *, what: str, patience_s: float = LIMIT_S) -> RemotePath:
        """Make the path of a URL; this sends no request. `what` names the option or configuration
        key in messages. `patience_s`: seconds for which a failed request is retried.

        Raises ConfigError for a URL that cannot be used, CheckpointError if fsspec lacks a package
        for its protocol.
        """
        check_folder(what, url)
        from fsspec.core import url_to_fs

        try:
            system, _ = Operation(f"open {url}", patience_s).request(lambda: url_to_fs(url))
        except Failed as failed:
            raise CheckpointError(f"{what}={url}: {one_line(failed.cause)}") from failed.cause
        return cls(url.rstrip("/"), ObjectStore(system, patience_s))

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}", self.store)

    @property
    def name(self) -> str:
        """Last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """Folder that contains the path."""
        return RemotePath(self.url.rpartition("/")[0], self.store)

    @property
    def _key(self) -> str:
        return str(self.store.system._strip_protocol(self.url))

    def _ask(self, doing: str, work: Callable[[], T]) -> T:
        """Return the result of the request `work`, with retries. `doing`: a verb for messages."""
        return self._all(doing, lambda operation: operation.request(work))

    def _all(self, doing: str, work: Callable[[Operation], T]) -> T:
        operation = self._operation(doing)
        try:
            return operation.run(lambda: work(operation))
        except Failed as failed:
            gone = isinstance(failed.cause, FileNotFoundError)
            kind = CheckpointError if gone else StorageError
            raise kind(str(failed)) from failed.cause

    def _operation(self, doing: str) -> Operation:
        return Operation(f"{doing} {self.url}", self.store.patience_s)

    def probe(self) -> None:
        """Write and remove an object, so that a store without write access fails before a save."""
        here = self / f".staging-probe-{secrets.token_hex(8)}"
        here.replace(b"")
        here.unlink()

    def stage(self, step: int, nbytes: int, name: Callable[[], str]) -> str:
        """Return a new name for the folder of a save. A folder of an object store need not be made:
        it exists once it contains objects."""
        return f"{name()}-{secrets.token_hex(8)}"

    def names(self) -> list[str]:
        return sorted(self._listed())

    def _listed(self) -> dict[str, int | None]:
        """Return the name and size in bytes of everything in the folder."""
        system, key = self.store.system, self._key

        def ask() -> list[dict[str, Any]]:
            system.invalidate_cache()
            return unless_absent(lambda: list(system.ls(key, detail=True)), [])

        found = self._ask("list", ask)
        return {
            str(info["name"]).rstrip("/").rpartition("/")[2]: info.get("size") for info in found
        }

    def sync(self) -> None:
        """Do nothing: an object is durable once the store has answered the request to write it."""

    def sees_attempt(self) -> bool:
        return True

    def sizes(self, names: Iterable[str], suffix: str) -> dict[str, int]:
        wanted, found = set(names), self._listed()
        if missing := wanted - found.keys():
            raise CheckpointError(f"cannot read {self / min(missing)}: there is no such object")
        return {
            name: size or 0
            for name, size in found.items()
            if name in wanted or name.endswith(suffix)
        }

    def publish(self, name: Callable[[], str]) -> str:
        """Return the folder's name; writing the manifest has already committed the checkpoint."""
        return self.name

    def is_checkpoint(self) -> bool:
        return (self / MANIFEST).exists()

    def withdraw(self) -> RemotePath:
        """Delete the manifest: a folder without one is not a checkpoint."""
        (self / MANIFEST).unlink()
        return self

    def discard(self) -> None:
        def sweep() -> None:
            for keys in self._batches():
                _delete(self.store.system, keys)

        with contextlib.suppress(Failed):
            self._operation("remove").request(sweep, self._moment)

    def remove(self) -> None:
        for keys in self._ask("list", self._batches):
            self._ask("remove", functools.partial(_delete, self.store.system, keys))

    def _batches(self) -> list[list[str]]:
        """Return the key of this object, or the keys of all objects in this folder, in batches. The
        manifest comes first, so that a removal begins with it."""
        system, key = self.store.system, self._key
        system.invalidate_cache()
        keys = sorted(system.find(key), key=lambda found: not found.endswith(f"/{MANIFEST}"))
        starts = range(1, len(keys), AT_ONCE)
        return [keys[:1], *(keys[start : start + AT_ONCE] for start in starts)]

    @property
    def _moment(self) -> float:
        """Time limit, in seconds, for removals that a later start of the run would repeat."""
        return min(DISCARD_S, self.store.patience_s / 4)

    def write(self, fill: Callable[[BinaryIO], T]) -> T:
        return self._all("write", lambda operation: self._upload(fill, operation))

    def _upload(self, fill: Callable[[BinaryIO], T], operation: Operation) -> T:
        request, system, key = operation.request, self.store.system, self._key
        file = request(lambda: system.open(key, "wb", block_size=PART_BYTES))
        try:
            result = fill(cast(BinaryIO, _Upload(file, operation)))
            request(file.close)
        except BaseException as error:
            if isinstance(error, Exception):
                with contextlib.suppress(Failed):
                    request(lambda: file.discard(), self._moment)
            with contextlib.suppress(AttributeError):
                file.closed = True  # else it would write its buffer when it is deleted
            raise
        return result

    def replace(self, data: bytes) -> None:
        system, key = self.store.system, self._key
        self._ask("write", lambda: system.pipe_file(key, data))

    @contextmanager
    def open(self, *, until: int | None = None) -> Iterator[BinaryIO]:
        raw = _Ranges(self, until)
        yield cast(BinaryIO, raw if until is None else io.BufferedReader(raw, AHEAD_BYTES))

    def read(self, limit: int) -> bytes:
        size = self._size()
        if size > limit:
            raise CheckpointError(f"{self} has {size} bytes, at most {limit} are allowed")
        return self.read_range(0, size) if size else b""

    def read_range(self, start: int, stop: int) -> bytes:
        """Read the bytes [start, stop), or fewer if the object ends before `stop`. Raises
        StorageError if the store sends fewer bytes than exist."""
        system, key = self.store.system, self._key

        def ask() -> bytes:
            data: bytes = system.cat_file(key, start=start, end=stop)
            if len(data) < stop - start:
                system.invalidate_cache()
                available = min(int(system.info(key)["size"]), stop) - start
                if len(data) < available:
                    raise OSError(f"the store sent {len(data)} of {available} bytes")
            return data

        return self._ask("read", ask)

    def exists(self) -> bool:
        system, key = self.store.system, self._key

        def ask() -> bool:  # fsspec's exists() is False after any failure
            system.invalidate_cache()
            return unless_absent(lambda: bool(system.info(key)["type"] == "file"), False)

        return self._ask("look for", ask)

    def modified(self) -> float | None:
        system, key = self.store.system, self._key
        try:
            return float(self._ask("read", lambda: system.modified(key).timestamp()))
        except CheckpointError:
            return None

    def unlink(self) -> None:
        system, key = self.store.system, self._key
        self._ask("remove", lambda: _delete(system, [key]))

    def _size(self) -> int:
        system, key = self.store.system, self._key

        def ask() -> int:
            system.invalidate_cache()
            return int(system.info(key)["size"])

        return self._ask("read", ask)


class _Upload:
    """File-like object for writing an object of the store."""

    def __init__(self, file: Any, operation: Operation) -> None:
        self._file, self._operation = file, operation

    def write(self, data: Any) -> int:
        return int(self._operation.request(lambda: self._file.write(data)))


class _Ranges(io.RawIOBase):
    """File-like object that reads an object of the store by ranges, up to the offset `until`."""

    def __init__(self, path: RemotePath, until: int | None) -> None:
        self._path, self._until, self._at = path, until, 0
        self._ended = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET, "from the beginning"
        self._at, self._ended = offset, False
        return offset

    def readinto(self, buffer: Any) -> int:
        stop = self._at + len(buffer)
        if self._until is not None:
            stop = min(stop, self._until)
        if self._ended or stop <= self._at:
            return 0
        data = self._path.read_range(self._at, stop)
        self._ended = len(data) < stop - self._at
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _delete(system: Any, keys: list[str]) -> None:
    """Remove objects; missing ones cause no error."""
    try:
        if keys:
            system.rm(keys)
    except FileNotFoundError:
        for key in keys:
            unless_absent(functools.partial(system.rm_file, key), None)
