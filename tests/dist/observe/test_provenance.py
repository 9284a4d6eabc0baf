import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import torch

import megapipe
from megapipe.observe import package_hash, provenance
from megapipe.observe.memory import memory_gib
from megapipe.observe.provenance import git_state


def git(folder, *arguments):
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("no git on this machine")
    git(tmp_path, "init", "--quiet")
    (tmp_path / "train.py").write_text("print(1)\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_git_state_names_the_commit(tree):
    commit = git(tree, "rev-parse", "HEAD")
    assert git_state(tree) == {"commit": commit, "dirty": False}


@pytest.mark.parametrize("name", ["train.py", "new.py"])
def test_changed_and_new_files_make_the_tree_dirty(tree, name):
    (tree / name).write_text("print(2)\n")
    assert git_state(tree)["dirty"] is True


def test_the_environment_does_not_redirect_git(tree, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert git_state(tree) is not None


def test_only_the_top_of_a_work_tree_has_a_state(tree, tmp_path_factory):
    folder = tree / "site-packages"
    folder.mkdir()
    assert git_state(folder) is None
    assert git_state(tmp_path_factory.mktemp("plain")) is None


def test_no_git_no_state(tree, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert git_state(tree) is None


def test_provenance_is_json_and_holds_no_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    found = provenance(tmp_path)
    assert found["versions"]["megapipe"] == megapipe.__version__
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["host"] == socket.gethostname()
    assert found["git"] is None
    assert found["package_hash"] == package_hash()
    assert "hunter2" not in json.dumps(found)


def test_the_hash_covers_paths_and_contents(tmp_path):
    def tree_hash(files):
        root = tmp_path / "package"
        shutil.rmtree(root, ignore_errors=True)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return package_hash(root)

    one = tree_hash({"a.py": "x", "sub/b.py": "y"})
    assert one == tree_hash({"sub/b.py": "y", "a.py": "x"})
    assert one == tree_hash({"a.py": "x", "sub/b.py": "y", "__pycache__/a.pyc": "z"})
    others = [
        {"a.py": "x2", "sub/b.py": "y"},
        {"a.py": "x", "b.py": "y"},
        {"a.py": "x"},
        {"a.py": "xy", "sub/b.py": ""},
    ]
    assert len({one, *map(tree_hash, others)}) == 5


def test_the_hash_is_of_the_package_itself(tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(Path(megapipe.__file__).parent, copy)
    assert package_hash(copy) == package_hash()


def test_memory_on_cpu_is_the_resident_set():
    before = memory_gib(torch.device("cpu"))
    held = torch.ones(2**26)  # 0.25 GiB, touched
    grown = memory_gib(torch.device("cpu")) - before
    assert held.sum() > 0
    assert 0.2 < grown < 0.35


def test_memory_is_unknown_without_proc(monkeypatch):
    def missing(self):
        raise FileNotFoundError(str(self))

    monkeypatch.setattr(Path, "read_bytes", missing)
    assert memory_gib(torch.device("cpu")) is None
