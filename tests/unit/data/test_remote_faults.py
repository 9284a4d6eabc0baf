"""Sources on a server that fails for a while, for ever, or does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megapipe.config.data import DataConfig
from megapipe.data import remote
from megapipe.data.remote import fetched
from megapipe.errors import DataError
from megapipe.util import heartbeat, retries
from tests.parity import object_files
from tests.parity.object_server import BUCKET, Fault, ObjectServer, Request, serving

TEXTS = {"a/1.txt": b"one" * 1000, "a/deep/2.txt": b"two" * 1000, "b.txt": b"b"}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """Yield a server with TEXTS, whose clients retry failed requests without sleeping."""
    object_files.register()
    monkeypatch.setattr(retries, "sleep", lambda seconds: None)
    monkeypatch.setattr(remote, "AT_ONCE", 1000)
    with serving() as server:
        for name, content in TEXTS.items():
            server.put(f"{BUCKET}/run/{name}", content)
        yield server


def fetch(cache: Path, source: str) -> dict[str, bytes]:
    """Copy a source into the cache and return its files by name."""
    config = fetched(DataConfig(source=source, cache=str(cache)), progress=False)
    files = next(path for path in Path(config.source, "x").parents if path.name == "files")
    return {str(p.relative_to(files)): p.read_bytes() for p in files.rglob("*") if p.is_file()}


def fail_at(store: ObjectServer, number: int, times: int, fault: Fault = "error") -> None:
    first = len(store.requests) + number
    store.fault = lambda i, request: fault if first <= i < first + times else None


SOURCES = {
    "b.txt": {"b.txt": b"b"},
    "a": {"1.txt": TEXTS["a/1.txt"], "deep/2.txt": TEXTS["a/deep/2.txt"]},
    "a/**/*.txt": {"1.txt": TEXTS["a/1.txt"], "deep/2.txt": TEXTS["a/deep/2.txt"]},
}


@pytest.mark.parametrize("fault", ["error", "drop", "short"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_failure_that_passes_is_got_over_at_each_request(
    tmp_path: Path, store: ObjectServer, name: str, fault: Fault
) -> None:
    """Nothing is overlooked for it, in no listing."""
    assert fetch(tmp_path / "first", store.url(f"run/{name}")) == SOURCES[name]
    number = len(store.requests)
    for at in range(number):
        object_files.ObjectFileSystem.clear_instance_cache()
        fail_at(store, at, 2, fault)
        assert fetch(tmp_path / str(at), store.url(f"run/{name}")) == SOURCES[name], at


def test_a_file_goes_on_where_it_was_cut_short(tmp_path: Path, store: ObjectServer) -> None:
    begun = []

    def fault(number: int, request: Request) -> Fault | None:
        if request.kind == "GET" and request.nbytes > 1:
            begun.append(request.nbytes)
            return "drop" if len(begun) in (2, 3) else None
        return None

    store.fault = fault
    assert fetch(tmp_path, store.url("run/a/1.txt")) == {"1.txt": TEXTS["a/1.txt"]}


def test_a_server_that_stays_away_ends_in_a_line_that_others_have_announced(
    tmp_path: Path, store: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(heartbeat, "print_notice", said.append)
    fail_at(store, 0, 10**6)
    with pytest.raises(DataError) as caught:
        fetch(tmp_path, store.url("run/b.txt"))
    assert str(caught.value).startswith(f"data.source={store.url('run/b.txt')}: cannot look for ")
    assert str(caught.value).endswith("b.txt: the server answers 503 (29 tries in 200 s)")
    assert len(said) == 3
    assert "b.txt yet: the server answers 503 (tries: 5 in 8 s; they end after 200 s)" in said[0]


def test_a_server_that_hangs_is_not_waited_for(
    tmp_path: Path, store: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it hangs once, another connection is tried; if for ever, there is an end."""
    monkeypatch.setattr(retries.Operation.__init__, "__defaults__", (0.8,))
    for number in range(3):
        object_files.ObjectFileSystem.clear_instance_cache()
        fail_at(store, number, 1, "mute")
        monkeypatch.setattr(retries, "WAITS_S", (0.1,))
        assert fetch(tmp_path / str(number), store.url("run/b.txt")) == SOURCES["b.txt"]
    fail_at(store, 0, 10**6, "mute")
    with pytest.raises(DataError, match=r"no answer in 0\.4 s \(2 tries in 1 s\)$"):
        fetch(tmp_path / "none", store.url("run/b.txt"))
