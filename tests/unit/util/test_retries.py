"""Requests that fail for a while, for ever, or have no answer."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from megapipe.util import heartbeat, retries
from megapipe.util.retries import Failed, Operation, ask, unless_absent


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines that are told; only waits for an answer last."""
    lines: list[str] = []
    monkeypatch.setattr(heartbeat, "print_notice", lines.append)
    monkeypatch.setattr(retries, "sleep", lambda seconds: None)
    return lines


def failing(times: float, error: Exception) -> Any:
    """Return a request that fails `times` times; its `made` counts the calls."""

    def request() -> str:
        request.made += 1  # type: ignore[attr-defined]
        if request.made <= times:  # type: ignore[attr-defined]
            raise error
        return "bytes"

    request.made = 0  # type: ignore[attr-defined]
    return request


class Refusal(Exception):
    """The error that a library raises for an answer of a web server."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}, message='of the server'")
        self.status = status


class CutShort(Exception):
    """The error of aiohttp for an answer that ends early, with a status of its own."""

    code = 400


class Answer(Exception):
    """The error of an answer, as botocore has it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"An error occurred ({status})")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def behind(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_a_failure_that_passes_soon_is_not_told(said: list[str]) -> None:
    request = failing(3, Refusal(503))
    assert ask("read x", request) == "bytes"
    assert (request.made, said) == (4, [])


def test_one_that_lasts_is_told_until_it_passes(said: list[str]) -> None:
    assert ask("read x", failing(14, Refusal(503))) == "bytes"
    assert said == [
        "cannot read x yet: 503, message='of the server' (tries: 5 in 8 s; they end after 200 s)",
        "cannot read x yet: 503, message='of the server' (tries: 13 in 72 s; they end after 200 s)",
        "could read x after 88 s, at try 15",
    ]


def test_one_that_does_not_pass_ends_within_the_limit(said: list[str]) -> None:
    request = failing(float("inf"), Refusal(503))
    with pytest.raises(Failed) as caught:
        ask("read x", request)
    assert str(caught.value) == (
        "cannot read x: 503, message='of the server' (29 tries in 200 s)"
    ), said
    assert len(said) == 3


def test_no_answer_is_told_and_asked_for_again(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_LINE_S", 0.5)
    over = threading.Event()
    calls: list[int] = []

    def request() -> str:
        calls.append(1)
        if len(calls) == 1:
            over.wait()
        return "bytes"

    operation = Operation("read x", 2.0)
    assert operation.run(lambda: operation.request(request)) == "bytes"
    over.set()
    assert said[0].startswith("cannot read x yet: no answer (tries: 1 in ")
    assert said[0].endswith(" they end after 2 s)")
    assert said[-1].endswith(", at try 2")


def test_one_that_never_answers_has_an_end(said: list[str]) -> None:
    over = threading.Event()
    operation = Operation("read x", 0.4)
    with pytest.raises(Failed, match=r"^cannot read x: no answer in 0\.2 s$"):
        operation.run(lambda: operation.request(over.wait))
    over.set()


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("x"),
        PermissionError("x"),
        Refusal(404),
        Refusal(401),
        Answer(400),
        behind(FileNotFoundError("x"), Refusal(404)),
        behind(OSError("x"), Answer(400)),
        ValueError("x"),
        ImportError("Install s3fs"),
        type("NoCredentialsError", (Exception,), {})("x"),
    ],
)
def test_what_is_refused_for_good_is_not_repeated(said: list[str], error: Exception) -> None:
    request = failing(1, error)
    with pytest.raises(Failed):
        ask("read x", request)
    assert request.made == 1


@pytest.mark.parametrize(
    "error",
    [
        OSError("the network is down"),
        ConnectionResetError("x"),
        TimeoutError("x"),
        Refusal(500),
        Refusal(429),
        Answer(503),
        behind(FileNotFoundError("x"), Refusal(503)),
        behind(FileNotFoundError("x"), ConnectionRefusedError("x")),
        behind(OSError("x"), Answer(503)),
        behind(Exception("Response payload is not completed"), CutShort()),
        json.JSONDecodeError("cut short", "{", 1),
    ],
)
def test_what_may_pass_is(said: list[str], error: Exception) -> None:
    request = failing(1, error)
    assert ask("read x", request) == "bytes"
    assert request.made == 2


def test_a_failure_is_no_absence(said: list[str]) -> None:
    """fsspec's file system for the web says that nothing is there, whatever the server says."""
    assert unless_absent(failing(1, behind(FileNotFoundError("x"), Refusal(404))), "none") == "none"
    with pytest.raises(FileNotFoundError):
        unless_absent(failing(1, behind(FileNotFoundError("x"), Refusal(503))), "none")


def test_one_process_of_a_node_tells(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_is_verbose", True)
    retries.be_quiet()
    assert ask("read x", failing(14, Refusal(503))) == "bytes"
    assert said == []


def test_no_line_tells_a_signature(said: list[str]) -> None:
    url = "https://example.org/x?signature=secret"
    error = Refusal(503)
    error.args = (f"503, url='{url}'",)
    with pytest.raises(Failed) as caught:
        ask(f"read {url}", failing(float("inf"), error))
    assert said
    assert all("secret" not in line for line in (*said, str(caught.value)))


def test_work_is_begun_again_as_a_whole(said: list[str]) -> None:
    first, second = failing(0, OSError()), failing(2, OSError("reset"))
    operation = Operation("write x")
    operation.run(lambda: (operation.request(first), operation.request(second)))
    assert (first.made, second.made) == (3, 3)
