"""An fsspec file system for :mod:`tests.parity.object_server`, as `objects://HOST:PORT/...`.

Like those of real stores it writes in parts, caches listings, and waits without limit for a server
that does not answer. Run as a script it registers itself, and then runs the script of the
repository that its first argument names: ``python tests/parity/object_files.py train.py ...`` is a
job that may use such a store.
"""

from __future__ import annotations

import http.client
import json
import os
import runpy
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class ObjectFileSystem(AbstractFileSystem):
    """Objects of a server, whose host and port are the first part of every path."""

    protocol = "objects"

    def _request(
        self, method: str, path: str, data: bytes = b"", query: Any = None, **headers: str
    ) -> tuple[bytes, Any]:
        place, _, key = path.partition("/")
        target = f"/{quote(key)}" + (f"?{urlencode(query)}" if query else "")
        connection = http.client.HTTPConnection(place)
        try:
            headers["X-Process"] = str(os.getpid())
            connection.request(method, target, body=bytes(data), headers=headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status == 404:
            raise FileNotFoundError(text.decode() or path)
        if answer.status == 403:
            raise PermissionError("Forbidden")
        if answer.status >= 400:
            raise OSError(f"the server answers {answer.status}")
        return text, answer.headers

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            names = json.loads(self._request("GET", path, query={"list": 1})[0])
            if not names:
                raise FileNotFoundError(path)
            self.dircache[path] = [
                {
                    "name": f"{path}/{name}",
                    "size": size or 0,
                    "type": "directory" if size is None else "file",
                }
                for name, size in names.items()
            ]
        found = self.dircache[path]
        return found if detail else [info["name"] for info in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        for info in self.dircache.get(self._parent(path), []):
            if info["name"] == path:
                return dict(info)
        try:
            headers = self._request("HEAD", path)[1]
        except FileNotFoundError:
            self.ls(path)
            return {"name": path, "size": 0, "type": "directory"}
        return {
            "name": path,
            "size": int(headers["x-size"]),
            "type": "file",
            "written": float(headers["x-written"]),
        }

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["written"], UTC)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        given = {} if end is None else {"Range": f"bytes={start or 0}-{end - 1}"}
        return self._request("GET", self._strip_protocol(path), **given)[0]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self._request("PUT", self._strip_protocol(path), value)

    def rm_file(self, path: str) -> None:
        self._request("DELETE", self._strip_protocol(path))

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **_: Any) -> ObjectFile:
        return ObjectFile(self, path, mode, block_size or 1 << 20)


class ObjectFile(AbstractBufferedFile):
    """An object that is written in parts, or in one request if it is small."""

    def _initiate_upload(self) -> None:
        self.upload, self.number = uuid.uuid4().hex, 0

    def _upload_chunk(self, final: bool = False) -> bool:
        data = self.buffer.getvalue()
        if final and not self.number:
            self.fs.pipe_file(self.path, data)
            return True
        if data:
            query = {"upload": self.upload, "part": self.number}
            self.fs._request("PUT", self.path, data, query=query)
            self.number += 1
        if final:
            self.fs._request("POST", self.path, query={"upload": self.upload})
        return True

    def discard(self) -> None:
        if getattr(self, "number", 0):
            self.fs._request("DELETE", self.path, query={"upload": self.upload})


def register() -> None:
    """Register the protocol with fsspec, in this process."""
    fsspec.register_implementation("objects", ObjectFileSystem, clobber=True)


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[0] = str(root)
    from tests.parity import object_files

    object_files.register()
    sys.argv = [str(root / sys.argv[1]), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
