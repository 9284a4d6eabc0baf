"""Checkpoints on object storage, by whatever protocol fsspec knows.

A store has no rename, so the object ``manifest.json``, written last and sealed by its own digest,
is the commit: a folder without it is no checkpoint. An attempt writes into a folder with a name of
its own from the start, so that no two attempts, not even of a job that was taken for dead, share an
object.

A request that fails is repeated for as long as the store's patience lasts, a shard from its
beginning (:mod:`megapipe.util.retries`). Nothing is kept of listings: other processes write there
too.
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
from megapipe.util.retries import LIMIT_S, Failed, Operation, unless_absent
from megapipe.util.urls import check_folder
from megapipe.words import one_line

DISCARD_S = 10.0
"""Seconds for removing what a failed attempt has left: the next start does so too."""
PART_BYTES = 1 << 25
"""Most of an object that is held in memory while it is written, as a part of its upload."""
AHEAD_BYTES = 1 << 24
"""Most that is asked for at once of an object that is read on to a given byte."""
AT_ONCE = 500
"""Objects that are removed by one call."""
T = TypeVar("T")


@dataclass(frozen=True)
class ObjectStore:
    """An fsspec file system, and for how many seconds a request to it is repeated."""

    system: Any
    patience_s: float


@dataclass(frozen=True, order=True)
class RemotePath:
    """An object, or the folder of objects whose keys begin with its own; see
    :class:`~megapipe.checkpoint.storage.StoragePath`."""

    url: str
    store: ObjectStore = field(compare=False, repr=False)
    most_readers = 1
    """Not every file system of fsspec may be asked by several threads."""

    @classmethod
    def of(cls, url: str, *, what: str, patience_s: float = LIMIT_S) -> RemotePath:
        """The place of a URL that a user has given as `what`; nothing is asked of the store.

        Raises ConfigError for one that cannot be taken, CheckpointError where fsspec lacks what its
        protocol needs.
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
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder around it."""
        return RemotePath(self.url.rpartition("/")[0], self.store)

    @property
    def _key(self) -> str:
        return str(self.store.system._strip_protocol(self.url))

    def _ask(self, doing: str, work: Callable[[], T]) -> T:
        """The result of a request, repeated if need be."""
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
        """Write and remove an object, to find out before a save whether that is possible."""
        here = self / f".staging-probe-{secrets.token_hex(8)}"
        here.replace(b"")
        here.unlink()

    def stage(self, step: int, nbytes: int, name: Callable[[], str]) -> str:
        """The folder that the checkpoint will have; it is there once there are objects in it."""
        return f"{name()}-{secrets.token_hex(8)}"

    def names(self) -> list[str]:
        return sorted(self._listed())

    def _listed(self) -> dict[str, int | None]:
        """Names of all that is in the folder, with their bytes."""
        system, key = self.store.system, self._key

        def ask() -> list[dict[str, Any]]:
            system.invalidate_cache()
            return unless_absent(lambda: list(system.ls(key, detail=True)), [])

        found = self._ask("list", ask)
        return {
            str(info["name"]).rstrip("/").rpartition("/")[2]: info.get("size") for info in found
        }

    def sync(self) -> None:
        """An object is durable when its request is answered."""

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
        """The manifest has made it one."""
        return self.name

    def is_checkpoint(self) -> bool:
        return (self / MANIFEST).exists()

    def withdraw(self) -> RemotePath:
        """Without its manifest it is none."""
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
        """The object and all in the folder, a manifest before the rest."""
        system, key = self.store.system, self._key
        system.invalidate_cache()
        keys = sorted(system.find(key), key=lambda found: not found.endswith(f"/{MANIFEST}"))
        starts = range(1, len(keys), AT_ONCE)
        return [keys[:1], *(keys[start : start + AT_ONCE] for start in starts)]

    @property
    def _moment(self) -> float:
        """Seconds for what a later start does as well."""
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
                file.closed = True  # it would else write what it has when it is let go
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
        """Read bytes `start` to `stop`, or fewer where the object ends before. Raises StorageError
        where the store answers with less than the object has."""
        system, key = self.store.system, self._key

        def ask() -> bytes:
            data: bytes = system.cat_file(key, start=start, end=stop)
            if len(data) < stop - start:
                system.invalidate_cache()
                there = min(int(system.info(key)["size"]), stop) - start
                if len(data) < there:
                    raise OSError(f"the store answers with {len(data)} of {there} bytes")
            return data

        return self._ask("read", ask)

    def exists(self) -> bool:
        system, key = self.store.system, self._key

        def ask() -> bool:  # exists() of fsspec takes any failure for a no
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
    """An object that is being written."""

    def __init__(self, file: Any, operation: Operation) -> None:
        self._file, self._operation = file, operation

    def write(self, data: Any) -> int:
        return int(self._operation.request(lambda: self._file.write(data)))


class _Ranges(io.RawIOBase):
    """An object that is read by ranges, which end at byte `until` if that is given."""

    def __init__(self, place: RemotePath, until: int | None) -> None:
        self._place, self._until, self._at = place, until, 0
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
        data = self._place.read_range(self._at, stop)
        self._ended = len(data) < stop - self._at
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _delete(system: Any, keys: list[str]) -> None:
    """Remove objects, of which some may be gone."""
    try:
        if keys:
            system.rm(keys)
    except FileNotFoundError:
        for key in keys:
            unless_absent(functools.partial(system.rm_file, key), None)
