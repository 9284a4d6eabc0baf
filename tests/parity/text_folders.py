"""Folders of texts, and a tokenizer that was trained on them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapipe.config.data import DataConfig
from tests.unit.data.data_cases import TEXTS, train_bpe


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(["<pad>", "<|endoftext|>"]).save(str(path))
    return path


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i:03}.txt").write_bytes(text.encode())
    return folder


@pytest.fixture
def folder_config(text_folder: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(source=str(text_folder), cache=str(tmp_path / "cache"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Make a folder that every user may enter; restore privileges that the test has dropped."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    user = os.geteuid()
    yield folder
    os.seteuid(user)
    shutil.rmtree(folder)
