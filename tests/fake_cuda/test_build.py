"""The library of the device is compiled once; an error line says if it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda import build


@pytest.mark.full
def test_it_is_built_once() -> None:
    first = build.library()
    written = first.stat().st_mtime_ns
    assert build.library() == first
    assert first.stat().st_mtime_ns == written


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the source file of another library, in an environment of its own."""
    folder = tmp_path / "library"
    folder.mkdir()
    monkeypatch.setattr(build, "SOURCE", folder)
    monkeypatch.setattr(build.sys, "prefix", str(tmp_path))
    return folder / "library.cpp"


def test_another_source_is_another_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler it is not available."""
    source.write_text("// nothing")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(build.NoCompiler, match="no C"):
        build.library()


def test_an_error_of_the_compiler_is_shown(source: Path, tmp_path: Path) -> None:
    source.write_text("not C++")
    with pytest.raises(RuntimeError, match="does not compile"):
        build.library()
    assert not list(tmp_path.glob("share/fake_cuda/*.so"))
