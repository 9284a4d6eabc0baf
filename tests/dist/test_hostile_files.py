"""Files and names that somebody made to do harm: nothing of them is run, nothing outside a folder
is written, and what they claim is not believed."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.cli import parse
from megapipe.config.data import DataConfig
from megapipe.convert import export
from megapipe.data.prepare.cache import _digest, prepare
from megapipe.data.tokenizer import load_tokenizer
from megapipe.errors import ConfigError, MegapipeError
from megapipe.util import heartbeat
from tests.parity.converted import write_checkpoint
from tests.parity.launches import fork_script
from tests.parity.reference import init_random
from tests.unit.model.transformers_models import model_of

ROOT = Path(__file__).parents[2]
MODEL = model_of("llama_gqa").model_copy(update={"dtype": "fp32", "vocab_size": 257, "layers": 2})
SHARD = "model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a checkpoint, ``step``, and a Hugging Face model, ``hf``."""
    folder = tmp_path_factory.mktemp("made")
    params = init_random(MODEL, seed=5, dtype=torch.float32)
    checkpoint = write_checkpoint(folder / "run", MODEL, params)
    export(checkpoint, folder / "hf")
    shutil.copytree(checkpoint.path, folder / "step")
    return folder


# Names.


def hostile_names() -> list[str]:
    """Return 200 names: paths, devices, control characters, other alphabets, options, lengths."""
    rng = random.Random(0)
    names = [
        "",
        ".",
        "..",
        "../x",
        "/x",
        "x/y",
        "x\\y",
        "~",
        "-x",
        "_x",
        ".x",
        "con:",
        "$HOME",
        "`id`",
    ]
    names += [f"x{chr(code)}y" for code in range(33)] + [
        f"x{chr(code)}" for code in range(127, 161)
    ]
    names += [f"x{mark}y" for mark in "!\"#$%&'()*+,/:;<=>?@[\\]^`{|}~"]
    names += [
        "x\n2026-01-01 step 5 | loss nan",
        "x\x1b[2J",
        "x\u202ey",
        "\uff0e\uff0e\uff0fx",
        "\u2024./x",
    ]
    names += ["é", "e\u0301", "ﬁ", "\u0660", "\ud7ff", "x" * 101, "x" * 5000, "x/" * 50, "x\0../y"]
    while len(names) < 200:
        pool = "ab.-_/\\ \n\t\0%é\u202e\u2215"
        name = "".join(rng.choices(pool, k=rng.randint(1, 12)))
        if not (
            name.isascii() and name.replace(".", "").replace("-", "").replace("_", "").isalnum()
        ):
            names = list(dict.fromkeys([*names, name]))
    return names


def test_names_of_runs() -> None:
    names = hostile_names()
    assert len(names) == len(set(names)) == 200
    for name in names:
        with pytest.raises(ConfigError) as info:
            parse([f"run.name={json.dumps(name)}"])
        said = str(info.value)
        assert said.startswith("command line: run.name="), said
        assert said.isprintable(), "nothing of it is a line or an order to a terminal"
        assert len(said) < 400
    for name in ("x", "A.b-c_d", "0..x", "x" * 100):
        assert parse([f"run.name={json.dumps(name)}"]).config.run.name == name


# Headers that claim too much.


def header(content: object, data: bytes = b"", length: int | None = None) -> bytes:
    return framed(json.dumps(content).encode(), data, length)


def framed(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: list[int], stop: int, start: int = 0, dtype: str = "F32") -> dict[str, Any]:
    return {"embedding": {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}}


BOMBS: dict[str, Callable[[], bytes]] = {
    "a header of 2^60 bytes": lambda: header({}, length=2**60),
    "a header of 2^64 - 1 bytes": lambda: header({}, length=2**64 - 1),
    "a header that is longer than the file": lambda: header({}, length=500),
    "2^60 elements": lambda: header(tensor([2**60], 2**62)),
    "2^60 elements in 8 bytes": lambda: header(tensor([2**60], 8), b"12345678"),
    "a product that wraps around": lambda: header(tensor([2**32, 2**32], 0)),
    "sides of which one is 0": lambda: header(tensor([2**62, 0, 2**62], 0)),
    "a thousand dimensions": lambda: header(tensor([2] * 1000, 8), b"12345678"),
    "negative sizes": lambda: header(tensor([-1, -2], 8), b"12345678"),
    "data before the file": lambda: header(tensor([2], 0, -8), b"12345678"),
    "nested lists": lambda: struct.pack("<Q", 200_000) + b"[" * 200_000,
    "a million names": lambda: header({f"x{i}": 0 for i in range(1_000_000)}),
    "a number with a million digits": lambda: framed(b'{"x":' + b"9" * 10**6 + b"}"),
}


OPEN = """
import json, resource, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from megapipe.convert.folder import HuggingFaceFolder, read_model
from megapipe.errors import CheckpointError
first, *others = map(Path, sys.argv[1:])
HuggingFaceFolder.of(first, *read_model(first))
kib = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for folder in others:
    given, before, began = read_model(folder), kib(), time.process_time()
    try:
        HuggingFaceFolder.of(folder, *given)
        said = None
    except CheckpointError as error:
        said = str(error)
    print(json.dumps([said, time.process_time() - began, kib() - before]))
"""


@pytest.mark.full
def test_headers_are_not_believed(made: Path, tmp_path: Path) -> None:
    """Each is refused within a second and 100 MB, in a process that has needed no more before."""
    folders = []
    for number, bomb in enumerate(BOMBS.values()):
        folder = Path(shutil.copytree(made / "hf", tmp_path / str(number)))
        (folder / SHARD).write_bytes(bomb())
        folders.append(str(folder))
    script = tmp_path / "open.py"
    script.write_text(OPEN.format(root=str(ROOT)))
    done = fork_script(tmp_path, str(script), str(made / "hf"), *folders)
    assert done.code == 0, done.err
    for bomb, line in zip(BOMBS, done.out.splitlines(), strict=True):
        said, seconds, kib = json.loads(line)
        assert said is not None, bomb
        assert said.isprintable(), bomb
        assert len(said) < 1000, bomb
        assert seconds < 1, bomb
        assert kib < 100_000, bomb


# Code in files.

LOOK = """
import importlib.machinery, json, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from megapipe.checkpoint.reader import Checkpoint
from megapipe.convert.folder import HuggingFaceFolder, read_model
from megapipe.errors import MegapipeError

def read(folder):
    kind, model = read_model(folder / "hf")
    found = HuggingFaceFolder.of(folder / "hf", kind, model)
    for name in found.shapes():
        found.read(name)

def check(folder):
    checkpoint = Checkpoint.open(folder / "step")
    checkpoint.verify(finite=True)
    for name in checkpoint.names():
        checkpoint.read(name)

seen, within = [], None
NEVER = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen",
         "pickle.find_class", "marshal.loads", "code.__new__")
def hook(event, given):
    if within is None:
        return
    what = f"{{given}} {{getattr(given[0], 'co_filename', '')}}" if given else ""
    if event in NEVER or (event in ("exec", "compile", "import") and within in what):
        seen.append([within, event, what])

first, *others = map(Path, sys.argv[1:])
check(first), read(first)  # what is loaded late is loaded now
sys.addaudithook(hook)
answers = dict()
for folder in others:
    within = str(folder)
    try:
        {{"step": check, "hf": read}}[folder.name.partition("-")[2]](folder)
        answers[within] = "taken"
    except MegapipeError as error:
        answers[within] = str(error)
within = None
print(json.dumps([seen, answers]))
"""


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def pickled(path: Path, canary: Path) -> None:
    path.write_bytes(pickle.dumps(Payload(canary)))


def zipped(path: Path, canary: Path) -> None:
    """Write a payload as torch.save does."""
    torch.save(Payload(canary), path)


def source(path: Path, canary: Path) -> None:
    path.write_text(f"open({str(canary)!r}, 'w').close()\n")


def archive(path: Path, canary: Path) -> None:
    """Write a zip that Python would run."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("__main__.py", f"open({str(canary)!r}, 'w').close()\n")


def with_code(folder: Path, canary: Path) -> None:
    """Write a model that has its own classes, as models on a hub do."""
    source(folder / "hf/modeling_x.py", canary)
    config = json.loads((folder / "hf/config.json").read_text())
    config["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling_x.X")
    (folder / "hf/config.json").write_text(json.dumps(config))


@pytest.mark.full
def test_nothing_in_a_file_is_run(made: Path, tmp_path: Path) -> None:
    """Payloads in every file of a checkpoint and of a model's folder, and beside them, under an
    audit hook of the interpreter."""
    canary, number = tmp_path / "canary", 0
    folders: dict[str, str] = {}

    def copy(what: str, kind: str) -> Path:
        """Make a folder with a copy of the `kind` that is looked at, ``step`` or ``hf``."""
        nonlocal number
        number += 1
        folder = tmp_path / f"{number:03}-{kind}"
        shutil.copytree(made / kind, folder / kind)
        folders[str(folder)] = what
        return folder

    places = [
        str(path.relative_to(made)) for kind in ("step", "hf") for path in (made / kind).iterdir()
    ]
    beside = [
        "hf/pytorch_model.bin",
        "hf/model.safetensors.index.json",
        "step/__init__.py",
        "hf/torch.py",
    ]
    for place in [*places, *beside]:
        for kind in (pickled, zipped, source, archive):
            kind(copy(f"{kind.__name__} {place}", place.partition("/")[0]) / place, canary)
    with_code(copy("code of a model", "hf"), canary)
    script = tmp_path / "look.py"
    script.write_text(LOOK.format(root=str(ROOT)))
    done = fork_script(tmp_path, str(script), str(made), *folders)
    assert done.code == 0, done.err
    seen, answers = json.loads(done.out)
    assert seen == []
    assert not canary.exists()
    assert len(answers) == len(folders) > 30
    for folder, what in folders.items():
        (place,) = what.split()[-1:]
        assert "\n" not in answers[folder]
        if place in places and place.endswith((".safetensors", "hf/config.json", "manifest.json")):
            assert answers[folder] != "taken", what


@pytest.mark.slow
def test_the_hook_sees_what_is_run(made: Path, tmp_path: Path) -> None:
    """A reader that unpickles is noticed, and one that imports."""
    canary = tmp_path / "canary"
    for change in (
        "import pickle\ncheck = lambda f: (f / 'x').exists() and pickle.load(open(f / 'x', 'rb'))",
        "import runpy\ncheck = lambda f: (f / 'x.py').exists() and runpy.run_path(str(f / 'x.py'))",
    ):
        folder = Path(shutil.copytree(made, tmp_path / f"{len(change)}-step"))
        pickled(folder / "x", canary)
        source(folder / "x.py", canary)
        text = LOOK.format(root=str(ROOT)).replace("seen, within", f"{change}\nseen, within")
        done = subprocess.run(
            [sys.executable, "-c", text, str(made), str(folder)], capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        seen, _ = json.loads(done.stdout)
        assert seen
        assert canary.exists()
        canary.unlink()


# Links.


@pytest.mark.parametrize("name", ["{}", ".{}.parts", ".{}.1"])
@pytest.mark.parametrize("leads_to", ["a folder", "a file", "nothing"])
def test_links_in_a_cache_lead_to_no_writing(
    name: str, leads_to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "STALE_S", 0.3)
    (tmp_path / "t.txt").write_text("the cat sat on a mat and ran away " * 40)
    outside = tmp_path / "outside"
    outside.mkdir()
    for file in ("train.bin", "meta.json", "alive", "0", "given.json"):
        (outside / file).write_text("mine")
    target = {"a folder": outside, "a file": outside / "alive", "nothing": tmp_path / "none"}[
        leads_to
    ]
    config = DataConfig(source=str(tmp_path / "t.txt"), cache=str(tmp_path / "cache"))
    tokenizer = load_tokenizer("byte")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / name.format(_digest(config, tokenizer))).symlink_to(target)
    with contextlib.suppress(MegapipeError):
        assert not prepare(config, tokenizer, progress=False).folder.is_symlink()
    assert {path.name: path.read_text() for path in outside.iterdir()} == dict.fromkeys(
        ("train.bin", "meta.json", "alive", "0", "given.json"), "mine"
    )
    assert not (tmp_path / "none").exists()
