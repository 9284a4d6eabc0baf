"""URLs with signatures and tokens: they are opened, and stand nowhere in what is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.registry import _registry

from megapipe.cli import dump, flatten, parse
from megapipe.command_line import print_error
from megapipe.config import strict_yaml
from megapipe.config.data import DataConfig
from megapipe.data.commands import main as prepare_data
from megapipe.data.prepare.remote_cache import MANIFEST
from megapipe.data.remote import fetched
from megapipe.errors import ConfigError, DataError
from megapipe.launch.launch_info import LaunchInfo
from megapipe.launch.rendezvous import open_store
from megapipe.launch.shutdown import Shutdown
from megapipe.layout.resolve import resolve
from megapipe.observe.observer import Observer
from megapipe.text import without_secrets
from megapipe.train.main import train
from megapipe.util.urls import check_url
from tests.parity.jobs import arguments
from tests.parity.signed_urls import SECRET, SIGNED, WEB


@pytest.fixture
def web() -> Iterator[type]:
    """Yield the web server, as fsspec knows it."""
    names: dict[str, type] = {}
    exec(WEB, names)
    yield names["Web"]
    _registry.pop("https")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("https://h/x?X-Amz-Signature=s3cret&a=b: gone", "https://h/x?***: gone"),
        ("URL('https://h/x?sig=s3cret%2F')", "URL('https://h/x?***')"),
        ("'https://h/x?sig=s3'cret'", "'https://h/x?***'"),
        ('{"a": "https://h/x?t=s3cret", "b": "or?"}', '{"a": "https://h/x?***", "b": "or?"}'),
        ("(https://h/x?s3cret).", "(https://h/x?***)."),
        ("https://h/x#token=s3cret and", "https://h/x?*** and"),
        ("zip://a.txt::https://h/x.zip?sig=s3cret", "zip://a.txt::https://h/x.zip?***"),
        ("bucket/x?sig=s3cret, cut off", "bucket/x?***, cut off"),
        ("https://h?sig=s3@cret", "https://h?***"),
        ("https://me:s3cret@h/x?sig=s3cret", "https://h/x?***"),
        ("https:/h/x?sig=s3cret", "https:/h/x?***"),
        ("https://h/x?***", "https://h/x?***"),
        ("s3://b/a?.txt, is it? a=b", "s3://b/a?.txt, is it? a=b"),
        ("https://h/x@y and a@b", "https://h/x@y and a@b"),
    ],
)
def test_what_is_left_out_of_a_text(text: str, written: str) -> None:
    assert without_secrets(text) == written


KEYS = (
    "data.source",
    "data.mixture.a.source",
    "data.validation.a",
    "data.test.a",
    "model.options.a",
)


@pytest.mark.parametrize("key", [*KEYS, "plan.device", "data.cache"])
def test_what_is_written_of_a_configuration(key: str) -> None:
    config = parse([f"{key}={SIGNED}"]).config
    written = without_secrets(SIGNED)
    assert written == "https://example.org/texts.txt?***"
    for text in (dump(config), json.dumps(flatten(config))):
        assert SECRET not in text
        assert written in text
    entries = {entry.key: entry.value for entry in strict_yaml.parse_mapping(dump(config))}
    assert entries[key] == written
    assert SECRET in str(config.model_dump()), "by which it is opened"


def test_other_texts_are_written_as_they_are() -> None:
    given = {"data.source": "a?b=c.txt", "data.cache": "x#y?z", "data.text_field": "(?P<a>b=c)"}
    config = parse(arguments(given)).config
    assert {key: flatten(config)[key] for key in given} == given


def test_no_error_and_no_note_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    error = DataError(f"data.source={SIGNED}: gone")
    error.__cause__ = OSError(f"no answer from {SIGNED}")
    assert SECRET not in str(error)
    print_error(error, trace=True)
    said = capsys.readouterr().err
    assert "OSError: no answer from https://example.org/texts.txt?***\n" in said
    assert SECRET not in said
    told = []
    sink = type("Sink", (), {"name": "sink", "note": lambda self, text: told.append(text)})
    Observer([sink()]).note(f"read {SIGNED}")
    assert told == ["read https://example.org/texts.txt?***"]


def test_no_traceback_of_a_bug_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    info = LaunchInfo()
    ending = Shutdown(info, open_store(info, 1.0))
    assert ending.report_unexpected(ValueError(f"no answer from {SIGNED}")) == 1
    said = capsys.readouterr().err
    assert "ValueError: no answer from https://example.org/texts.txt?***\n" in said
    assert SECRET not in said


@pytest.mark.parametrize("end", [" b", "ab.", "ab'", "ab)"])
def test_a_query_that_would_not_be_found_in_a_text_is_refused(end: str) -> None:
    with pytest.raises(ConfigError, match=r"^data\.source is a URL whose end is ambiguous"):
        check_url("data.source", SIGNED + end)
    with pytest.raises(ConfigError, match=r"^configuration: data\.source is a URL whose end"):
        resolve(parse([f"data.source={SIGNED}{end}"]).config, 1, 257)
    check_url("model.options.a", "see https://example.org/?a and b")
    check_url("data.source", f"{SIGNED}==")


def test_templates_are_not_opened() -> None:
    for url in ("reference://x.json", "simplecache::reference::https://example.org/x.json"):
        with pytest.raises(ConfigError, match="its templates may run code"):
            fetched(DataConfig(source=url))


def test_a_file_is_fetched_by_its_whole_url(tmp_path: Path, web: type) -> None:
    def fetch(url: str) -> Path:
        config = DataConfig(source=url, cache=str(tmp_path))
        return Path(fetched(config, progress=False).source)

    one = fetch(SIGNED)
    assert one.name == "texts.txt"
    assert one.read_bytes().startswith(b"the cat")
    manifest = one.parents[1] / MANIFEST
    assert json.loads(manifest.read_text())["source"] == without_secrets(SIGNED)
    assert fetch(f"{SIGNED}/a#b") == one, "the same file by a new signature"
    assert fetch(f"https://example.org/?f={SECRET}").name == "file"
    web.versions = {}  # type: ignore[attr-defined]
    assert fetch(SIGNED) != fetch(f"{SIGNED}&b"), "which of them may be is not known"
    assert SECRET not in "".join(map(str, tmp_path.rglob("*")))
    with pytest.raises(ConfigError, match="this URL was stored without its query"):
        fetch(without_secrets(SIGNED))


def test_a_command_says_nothing_of_it(
    tmp_path: Path, web: type, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepare_data(["--source", SIGNED, "--cache", "cache"]) == 0
    wrong = SIGNED.replace("Signature=s3cret", "Token=wrong0ne")
    for more in ([], ["--traceback"]):
        assert prepare_data(["--source", wrong, "--cache", "cache", *more]) == 3
    assert train([f"data.sorce={SIGNED}"]) == 2
    said = "".join(capfd.readouterr())
    assert "403, url='https://example.org/texts.txt?***'" in said
    assert SECRET not in said
    assert "wrong0ne" not in said
    assert [p for p in tmp_path.rglob("*") if p.is_file() and SECRET in str(p.read_bytes())] == []
