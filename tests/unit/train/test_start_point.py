"""`checkpoint.load` before any process group: what one process can tell of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import megapipe
from megapipe.config.config import Config
from megapipe.errors import CheckpointError, ConfigError
from megapipe.launch import progress
from megapipe.train.start_point import check_load
from tests.parity.bad_folder import MODEL, change_json, make_folder
from tests.unit.train.objects import Counting


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "made"
    make_folder(folder)
    return folder


def config(folder: Path, load: str | None, **model: object) -> Config:
    given = MODEL.model_dump() | model
    return Config.model_validate(
        {
            "model": given,
            "checkpoint": {"load": load and str(folder / load), "load_only": "weights"},
            "run": {"folder": str(folder / "runs")},
        }
    )


@pytest.mark.parametrize("load", [None, "run", "run/checkpoints/step-00000003", "hf"])
def test_the_same_model(load: str | None, made: Path) -> None:
    check_load(config(made, load))


@pytest.mark.parametrize("load", ["run", "run/checkpoints/step-00000003", "hf"])
def test_another_model(load: str, made: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"^checkpoint\.load: .*model\.layers is 3, stored is 2"
    ):
        check_load(config(made, load, layers=3))


def test_nothing_to_load(made: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape("checkpoint.load: ") + ".*no such folder"):
        check_load(config(made, "gone"))


def test_a_model_that_cannot_be_expressed(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "hf", tmp_path / "hf")
    change_json(tmp_path / "hf/config.json", hidden_act="gelu_fast")
    with pytest.raises(ConfigError, match=r"^checkpoint\.load: .*hidden_act"):
        check_load(config(tmp_path, "hf"))


@pytest.mark.usefixtures("without_git")
@pytest.mark.parametrize("refused", [False, True])
def test_the_class_of_a_folder_is_compared_once(
    refused: bool, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that begins from it ends with a line where the class computes another model."""
    compared = []

    def compare(given: object) -> None:
        compared.append(given)
        if refused:
            raise ConfigError("window = 3: another model")

    monkeypatch.setattr("megapipe.convert.folder.check_class", compare)
    sizes = {"steps": 1, "sequence_length": 8, "global_batch": 1, "microbatch": 1}
    given = config(made, "hf").model_dump() | {"train": sizes}
    given["run"] = {"folder": str(tmp_path)}
    given["optimizer"] = {"warmup_steps": 0, "schedule": "constant"}
    if refused:
        with pytest.raises(ConfigError, match=r"^checkpoint\.load: .*hf/config.json: window = 3:"):
            megapipe.train(given, data=Counting)
        assert not list(tmp_path.glob("*/checkpoints"))
    else:
        assert list(megapipe.train(given, data=Counting).glob("checkpoints/step-*"))
    assert len(compared) == 1


def test_none_that_opens_is_left_to_where_all_are_read(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "run", tmp_path / "run")
    next(tmp_path.glob("run/checkpoints/*/*.safetensors")).unlink()
    check_load(config(tmp_path, "run"))


def test_a_run_that_has_checkpoints_begins_with_them(made: Path, tmp_path: Path) -> None:
    """It does not matter what has become of the checkpoint that it once began with."""
    given = config(tmp_path, "gone")
    shutil.copytree(made / "run", tmp_path / "runs" / given.run.name)
    check_load(given)


def test_a_start_that_is_not_the_first(tmp_path: Path) -> None:
    file = tmp_path / "progress"
    assert not progress.is_restart({})
    assert not progress.is_restart({progress.ENVIRONMENT: str(file)})
    progress.write_request(file, progress.Request(before=0))
    assert progress.is_restart({progress.ENVIRONMENT: str(file)})
