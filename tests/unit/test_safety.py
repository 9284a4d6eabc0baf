"""What a run writes is its user's alone, stays in its folder, and holds no password."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch

from megapipe.checkpoint.durable import writable_by_others
from megapipe.cli import from_mapping, parse
from megapipe.command_line import Parser, run_command
from megapipe.config.data import DataConfig
from megapipe.console import COMMANDS
from megapipe.data.prepare import prepare
from megapipe.data.remote import fetched
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.errors import ConfigError, DataError
from megapipe.layout.resolve import resolve
from megapipe.train import run_folder
from megapipe.train.banner import banner_lines
from megapipe.train.main import train
from megapipe.train.resume.changes import Changes
from megapipe.train.start_point import StartPoint
from megapipe.util.skipped_samples import SkippedSamples


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_files_are_not_for_every_user_to_write(
    open_umask: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(["--help"]) == 0
    assert os.umask(0) == 0o002
    parser = Parser()
    parser.set_defaults(run=lambda given: (tmp_path / "x").touch())
    run_command(parser, [])
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o664
    os.umask(0o077)
    run_command(parser, [])
    assert os.umask(0) == 0o077, "what is stricter stays"


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {"train"}))
def test_every_command_sees_to_that(name: str, open_umask: None) -> None:
    main = import_module(COMMANDS[name][0]).main
    with contextlib.suppress(SystemExit):
        assert main(["--no-such-option"]) == 2
    assert os.umask(0) == 0o002


@pytest.mark.parametrize("name", ["log.jsonl", "checkpoints", "summary.json"])
def test_a_link_in_a_run_folder_is_refused_and_what_it_leads_to_is_left(
    name: str, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(outside)
    with pytest.raises(
        ConfigError, match=rf"{run / name} is a symbolic link, through which a run does"
    ):
        run_folder._take(run_folder.RunFolder(run))
    assert not any(outside.iterdir())
    assert [path.name for path in run.iterdir()] == [name], "nor is it locked"


@pytest.mark.parametrize("inside", [".", "00000.bin"])
def test_a_link_in_a_cache_is_refused_and_what_it_leads_to_is_left(
    inside: str, tmp_path: Path
) -> None:
    """It takes the place of a folder that is made under a name which others can know beforehand."""
    (tmp_path / "a.jsonl").write_text('{"text": "the cat sat on a mat"}\n' * 40)
    config = DataConfig(source=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache"))
    made = prepare(config, ByteTokenizer(), progress=False)
    shutil.rmtree(made.folder)
    place = made.folder.with_name(f".{made.digest}.parts") / inside
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(tmp_path / "outside")
    with pytest.raises(
        DataError, match=rf"cache.*: {place} is a symbolic link, through which a run does"
    ):
        prepare(config, ByteTokenizer(), progress=False)
    assert not (tmp_path / "outside").exists()
    assert place.is_symlink()


def test_a_link_among_copies_is_refused(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/linked/a/b.txt", b"text")
    config = DataConfig(source="memory://linked", cache=str(tmp_path / "cache"))
    folder = Path(fetched(config, progress=False).source).parent
    shutil.rmtree(folder)
    outside, kept = tmp_path / "outside", folder.with_name(f".{folder.name}.parts")
    outside.mkdir()
    kept.mkdir()
    (kept / "a").symlink_to(outside)
    with pytest.raises(
        DataError, match=rf"{kept / 'a'} is a symbolic link, through which a run does not"
    ):
        fetched(config, progress=False)
    assert not any(outside.iterdir())
    system.rm("/linked", recursive=True)


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "/tmp/x", ".x", "a\n", "", "x" * 101])
def test_no_name_of_a_run_leads_out_of_its_folder(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name="):
        from_mapping({"run.name": name}, "here")


URL = "https://me:s3cret@example.org/texts.txt"


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("data.source", []),
        ("data.mixture.a.source", ["data.mixture.b.source=x"]),
        ("data.validation.held", []),
        ("data.test.held", []),
        ("checkpoint.url", []),
        ("data.tokenizer", []),
        ("checkpoint.load", []),
        ("log.wandb_project", []),
    ],
)
def test_a_password_in_a_url_is_refused_without_a_word_of_it(key: str, more: list[str]) -> None:
    config = parse([f"{key}={URL}", *more]).config
    with pytest.raises(ConfigError) as info:
        resolve(config, 1, 257)
    assert f"{key} is a URL with a user name or password" in str(info.value)
    assert "s3cret" not in str(info.value)


def test_commands_refuse_it_too_and_an_at_sign_elsewhere_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a URL with a user name"):
        fetched(DataConfig(source=URL))
    for source in ("https://example.org/a@b", "s3://bucket/x@y", "me@host.txt"):
        resolve(parse([f"data.source={source}"]).config, 1, 257)


@pytest.mark.parametrize(
    "given",
    [
        [f"data.sorce={URL}"],
        [f"model.layers={URL}"],
        [f"data.source=https://me:{'s3cret' * 20}@example.org/"],
        [URL],
        [f"--{URL}"],
    ],
)
def test_no_error_repeats_a_password(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever key the URL was given to, and however much of it is shown."""
    assert train(given) == 2
    said = capsys.readouterr().err
    assert said.startswith("megapipe: error: ")
    assert "s3cret" not in said


def lines(
    folder: Path, *, own: bool = True, weights: bool = False, device: str = "cpu", **given: Any
) -> list[str]:
    """Return the lines, but for the first ones, of a run that resumes from a checkpoint at `folder`
    or begins with its weights."""
    config, layout = resolve(parse([f"{k}={v}" for k, v in given.items()]).config, 1, 257)
    coordinates = {"threads": torch.get_num_threads() + 1, "samples": 0}
    manifest = SimpleNamespace(coordinates=coordinates)
    checkpoint = SimpleNamespace(path=folder, step=3, manifest=manifest)
    policy = SimpleNamespace(stage=1)
    run: Any = SimpleNamespace(
        config=config,
        layout=layout,
        first_step=1,
        mesh=SimpleNamespace(rank=0, world=1, device=torch.device(device), backend="gloo"),
        train_step=SimpleNamespace(
            schedule=layout.schedule,
            policy=policy,
            kernels=SimpleNamespace(banner=lambda: "", warnings=list),
            position=SimpleNamespace(samples=0),
            skipped_samples=SkippedSamples(),
            streaming=None,
        ),
    )
    begun: dict[str, Any] = {"weights": checkpoint} if weights else {"checkpoint": checkpoint}
    return [*banner_lines(run, StartPoint(is_own=own, **begun), Changes())][3:]


def test_what_a_resumed_run_may_not_expect_is_told(tmp_path: Path) -> None:
    """Another number of threads, a key that is not used, and files that others may write."""
    now = torch.get_num_threads()
    threads = f"threads of a process (OMP_NUM_THREADS) were {now + 1} and are {now}: sums differ in"
    (told,) = lines(tmp_path)
    assert told.startswith(threads)
    assert lines(tmp_path, device="cuda") == []
    load = {"checkpoint.load": "other"}
    assert lines(tmp_path, device="cuda", own=False, **load) == []
    (told,) = lines(tmp_path, device="cuda", **load)
    assert told == "checkpoint.load=other is ignored: the run already has checkpoints"
    (tmp_path / "manifest.json").touch()
    (tmp_path / "manifest.json").chmod(0o666)
    (told,) = lines(tmp_path, device="cuda")
    words = f"{tmp_path / 'manifest.json'} may be written by every user"
    assert told == f"{words}: that user can change what this run trains on"
    (again,) = lines(tmp_path, weights=True)
    assert again == told


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may give files away")
def test_files_of_another_user_are_doubted(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    assert writable_by_others(tmp_path) is None
    os.chown(tmp_path / "manifest.json", 12345, -1)
    assert writable_by_others(tmp_path) == f"{tmp_path / 'manifest.json'} belongs to user 12345"
