"""An object store for tests, on a port of this machine: no rename, no folders, and faults.

An object exists with all its bytes or not at all: after one PUT, or after a POST that joins parts.
Every request has a number, from 0; a `fault` function may be asked how it fails.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

Fault = Literal["error", "drop", "late", "mute", "deny", "short"]
"""What goes wrong. "error": nothing is done, and the answer is 503. "drop", "late": the connection
ends without an answer, before or after the request is done. "mute": no answer comes. "deny": the
answer is 403. "short": the answer is well-formed but has half of its bytes."""
BUCKET = "bucket"


class Request(NamedTuple):
    """A client's request: PUT, PART, JOIN, ABORT, GET, HEAD, LIST or DELETE, and the key."""

    kind: str
    key: str
    nbytes: int
    """Number of bytes sent or asked for; 0 if not known."""
    process: int = 0
    """Process id of the client."""


@dataclass
class ObjectServer:
    """The store, with one bucket, BUCKET."""

    port: int = 0
    objects: dict[str, bytes] = field(default_factory=dict)
    written: dict[str, float] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    requests: list[Request] = field(default_factory=list)
    fault: Callable[[int, Request], Fault | None] = lambda number, request: None
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str) -> str:
        """Return the URL of a path in the bucket, for :mod:`tests.parity.object_files`."""
        return f"objects://127.0.0.1:{self.port}/{BUCKET}/{path}"

    def keys(self, prefix: str) -> list[str]:
        """Return the keys below a path of the bucket, without that path."""
        start = f"{BUCKET}/{prefix}/"
        return sorted(key.removeprefix(start) for key in self.objects if key.startswith(start))

    def meet(self, request: Request) -> Fault | None:
        """Note a request; return the fault that it should have."""
        with self.lock:
            number = len(self.requests)
            self.requests.append(request)
        return self.fault(number, request)

    def put(self, key: str, data: bytes) -> None:
        with self.lock:
            self.objects[key], self.written[key] = data, time.time()


@contextmanager
def serving() -> Iterator[ObjectServer]:
    """Run a store with an empty bucket until the block ends."""
    store = ObjectServer()

    class Handler(_Handler):
        server_store = store

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    store.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield store
    finally:
        store.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_store: ObjectServer

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, code: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.get("x_length", str(len(data))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _handle(self) -> None:
        store, parts = self.server_store, urlsplit(self.path)
        key, query = unquote(parts.path).strip("/"), parse_qs(parts.query)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.command
        if "upload" in query:
            kind = {"PUT": "PART", "POST": "JOIN", "DELETE": "ABORT"}[kind]
        elif "list" in query:
            kind = "LIST"
        wanted = self._range(len(store.objects.get(key, b"")))
        nbytes = len(body) or (wanted.stop - wanted.start if kind == "GET" else 0)
        process = int(self.headers.get("X-Process") or 0)
        fault = store.meet(Request(kind, key.partition("/")[2], nbytes, process))
        if fault == "mute":
            store.ended.wait()
        if fault in ("mute", "drop"):
            self.close_connection = True
            return
        if fault in ("error", "deny"):
            self._answer(503 if fault == "error" else 403)
            return
        if fault == "late":
            self.close_connection = True
            self._answer = lambda *_, **__: None  # type: ignore[method-assign]
        if fault == "short":
            whole = self._answer
            self._answer = (
                lambda code, data=b"", **headers: whole(  # type: ignore[method-assign]
                    code, data[: len(data) // 2], **headers
                )
            )
        if key.split("/")[0] != BUCKET:
            self._answer(404, b"NoSuchBucket")
            return
        getattr(self, f"_{kind.lower()}")(store, key, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _range(self, size: int) -> range:
        """Return the range of bytes that the request asks for."""
        text = self.headers.get("Range")
        if text is None:
            return range(size)
        start, _, last = text.removeprefix("bytes=").partition("-")
        return range(int(start), min(int(last) + 1, size) if last else size)

    def _put(self, store: ObjectServer, key: str, query: Any, body: bytes) -> None:
        store.put(key, body)
        self._answer(200)

    def _part(self, store: ObjectServer, key: str, query: Any, body: bytes) -> None:
        store.parts[query["upload"][0]][int(query["part"][0])] = body
        self._answer(200)

    def _join(self, store: ObjectServer, key: str, query: Any, body: bytes) -> None:
        found = store.parts.pop(query["upload"][0], None)
        if found is None:
            self._answer(404)
            return
        store.put(key, b"".join(found[number] for number in sorted(found)))
        self._answer(200)

    def _abort(self, store: ObjectServer, key: str, query: Any, body: bytes) -> None:
        store.parts.pop(query["upload"][0], None)
        self._answer(204)

    def _get(self, store: ObjectServer, key: str, query: Any, body: bytes) -> None:
        data = store.objects.get(key)
        if data is None:
            self._answer(404)
            return
        wanted = self._range(len(data))
        if wanted.start >= len(data) and "Range" in self.headers:
            self._answer(416)
            return
        self._answer(206 if "Range" in self.headers else 200, data[wanted.start : wanted.stop])

    def _head(self, store: ObjectServer, key: str, query: Any, body: bytes) -> None:
        data = store.objects.get(key)
        if data is None:
            self._answer(404)
            return
        self._answer(200, x_size=str(len(data)), x_written=str(store.written[key]))

    def _list(self, store: ObjectServer, key: str, query: Any, body: bytes) -> None:
        """Send the objects and common prefixes of keys, down to the next slash."""
        found: dict[str, int | None] = {}
        with store.lock:
            for each, data in store.objects.items():
                if each.startswith(f"{key}/"):
                    name, slash, _ = each[len(key) + 1 :].partition("/")
                    found[name] = None if slash else len(data)
        self._answer(200, json.dumps(found).encode())

    def _delete(self, store: ObjectServer, key: str, query: Any, body: bytes) -> None:
        with store.lock:
            gone = store.objects.pop(key, None)
        self._answer(404 if gone is None else 204)
