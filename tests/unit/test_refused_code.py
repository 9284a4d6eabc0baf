"""``run.user_code=refuse`` and MEGAPIPE_OWN_CODE=refuse: no code that a value names is loaded."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import megapipe
from megapipe import cli
from megapipe.config.config import Config
from megapipe.config.keys import CODE, KEYS, MAPPINGS
from megapipe.config.model import ModelConfig
from megapipe.config.section import documentation
from megapipe.errors import ConfigError
from megapipe.layout.model_spec import make_model_spec
from megapipe.layout.resolve import resolve
from megapipe.model.interface import RunShape
from megapipe.plan import commands as of_contexts
from megapipe.schedule import commands as of_schedules
from megapipe.train import python_api
from megapipe.train.main import train
from megapipe.util.user_code import ENVIRONMENT, UserCode, is_user_code

SOURCES = ("data.source", "data.mixture.a.source", "data.validation.held", "data.test.held")
NAMING = (*CODE, *SOURCES)
EXPERTS = ["model.moe.num_experts=4"]
NEEDED = {
    "data.mixture.a.source": ["data.mixture.b.source=x"],
    "context.algorithm": ["parallel.cp=2"],
    "model.moe.score_function": EXPERTS,
    "experts.dispatch": [*EXPERTS, "parallel.dp=2", "parallel.ep=2"],
}
DOCS = Path(megapipe.__file__).parents[1] / "docs/extending.md"


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that makes code, under a new ``module:name``, that tells when loaded."""
    monkeypatch.chdir(tmp_path)
    numbers = itertools.count()

    def make(text: str = "") -> str:
        name = f"theirs_{tmp_path.name}_{next(numbers)}".replace("-", "_")
        Path(f"{name}.py").write_text(f"open('loaded', 'w')\ndef f(**_): {text or 'pass'}\n")
        return f"{name}:f"

    return make


def is_loaded(spec: str) -> bool:
    return Path("loaded").exists() or spec.partition(":")[0] in sys.modules


@pytest.mark.parametrize("key", NAMING)
def test_each_key_by_file_and_command_line(
    key: str, theirs: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    spec, more = theirs(""), NEEDED.get(key, [])
    refused = f"{key}={spec}: it names code to run, which run.user_code=refuse does not allow\n"
    Path("theirs.yaml").write_text(f"run.user_code: allow\n{key}: {spec}\n")
    for given in (
        ["theirs.yaml", "run.user_code=refuse"],
        ["theirs.yaml", "run.user_code=refuse", "--dry-run"],
        ["run.user_code=refuse", "theirs.yaml"],
        [f"{key}={spec}", "run.user_code=refuse"],
    ):
        assert train([*given, *more]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert said.err.startswith("megapipe: error: ")
        assert said.err.endswith(refused)
    assert not is_loaded(spec)


@pytest.mark.parametrize("key", NAMING)
def test_the_environment_wins_over_a_configuration(
    key: str,
    theirs: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If neither refuses it, the same command loads the code of each key."""
    spec, more = theirs(""), NEEDED.get(key, [])
    given = [f"{key}={spec}", "run.user_code=allow", *more, "--dry-run"]
    monkeypatch.setenv(ENVIRONMENT, "refuse")
    assert train(given) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{'data.source' if key in SOURCES else key}={spec}: " in said
    assert said.endswith(f"it names code to run, which {ENVIRONMENT}=refuse does not allow\n")
    assert not is_loaded(spec)
    for value in ("Refuse", "no", " "):
        monkeypatch.setenv(ENVIRONMENT, value)
        assert train(given) == 2
        assert "in the environment: expected allow or refuse" in capsys.readouterr().err
    assert not is_loaded(spec)
    monkeypatch.setenv(ENVIRONMENT, "")
    train(given)
    assert is_loaded(spec)


def test_the_environment_holds_where_there_is_no_configuration(
    theirs: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Commands that take a schedule, and models of checkpoints, which name their code."""
    spec = theirs("")
    monkeypatch.setenv(ENVIRONMENT, "refuse")
    assert of_schedules.main(["show", spec, "--ranks", "2", "--microbatches", "2"]) == 2
    assert f"{spec}: it names code to run, which {ENVIRONMENT}=refuse" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"model.source={spec}: it names code to run"):
        make_model_spec(ModelConfig(source=spec), RunShape(8, microbatch=1))
    assert not is_loaded(spec)


def test_commands_that_take_a_configuration(
    theirs: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = theirs("")
    assert of_contexts.main(["compare", "run.user_code=refuse", f"context.algorithm={spec}"]) == 2
    assert f"context.algorithm={spec}: it names code to run" in capsys.readouterr().err
    assert not is_loaded(spec)


def test_from_python(theirs: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of a configuration are refused, and objects that the caller gives are not."""
    spec = theirs("")
    words = f"megapipe.train: train.loss_function={spec}: it names code to run"
    tree = {"run": {"user_code": "refuse"}, "train": {"loss_function": spec}}
    Path("theirs.yaml").write_text(f"run.user_code: refuse\ntrain.loss_function: {spec}\n")
    for given in (tree, Config.model_validate(tree)):
        with pytest.raises(ConfigError, match=words):
            python_api.train(given)
    with pytest.raises(ConfigError, match=words.replace("megapipe.train:", "theirs.yaml:")):
        python_api.train("theirs.yaml")
    assert not is_loaded(spec)
    commands = []

    def start(command: cli.Command, *_: object) -> None:
        commands.append(command)

    monkeypatch.setattr(python_api.job, "start", start)
    python_api.train({"run": {"user_code": "refuse"}}, loss=is_loaded)
    (command,) = commands
    assert command.config.train.loss_function == f"{__name__}:is_loaded"
    assert command.config.run.user_code == "allow", (
        "which the files of the run say, and are read by"
    )


@pytest.mark.parametrize(
    "spec", ["os:abort.x", "os:", ":abort", "os:a b", "./os:abort", "os:abort:x", "my-module:f"]
)
def test_all_that_is_imported_is_what_is_looked_for(spec: str) -> None:
    """Other forms, which would not be found in a configuration, are imported nowhere."""
    assert not is_user_code(spec)
    with pytest.raises(ConfigError, match="write module:name"):
        UserCode(spec, what="schedule", error=ConfigError)


def test_a_file_of_that_name_is_no_code(theirs: Callable[[str], str]) -> None:
    spec = theirs("")
    Path(spec).write_text("a text " * 100)
    config = cli.parse([f"data.source={spec}", "run.user_code=refuse"]).config
    resolve(config, 1, 257)
    assert not is_loaded(spec)


def texts() -> Iterator[tuple[str, str]]:
    """Yield every key that takes text, with a template of an argument that gives it a value."""
    for key, info in KEYS.items():
        words = str(info.annotation)
        if key not in MAPPINGS and "str" in words:
            yield key, f"{key}=[{{}}]" if "list" in words else f"{key}={{}}"
        elif key in MAPPINGS and (section := MAPPINGS[key]) is None:
            yield key, f"{key}.a={{}}"
        elif key in MAPPINGS:
            for name, field in section.model_fields.items():
                if "str" in str(field.annotation):
                    yield f"{key}.a.{name}", f"{key}.a.{name}={{}}"


@pytest.mark.parametrize(("key", "template"), [*texts()])
def test_every_key_that_takes_text(
    key: str, template: str, theirs: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """If its value is loaded as code, it is not loaded where that is refused."""
    spec = theirs("")
    given = [template.format(spec), *NEEDED.get(key, []), "--dry-run"]
    train([*given, "run.user_code=refuse"])
    refused = f"={spec}: it names code to run" in capsys.readouterr().err
    assert not is_loaded(spec)
    train(given)
    assert is_loaded(spec) == refused


def test_every_key_whose_documentation_tells_of_code() -> None:
    told = {
        key
        for key in KEYS
        for section in [cli.SECTIONS[key.rpartition(".")[0]]]
        if re.search(r"`module:\w+`", documentation(section)[key.rpartition(".")[2]])
    }
    assert told - {"run.user_code"} == {*CODE, "data.source"}


def test_no_place_that_loads_code_is_forgotten() -> None:
    """Keys of the calls in the package, of the list, and of the page that tells of them."""
    package = Path(megapipe.__file__).parent
    keys, others = set(), set()
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "UserCode" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "UserCode":
                (what,) = (k.value for k in node.keywords if k.arg == "what")
                assert isinstance(what, ast.Constant)
                name = str(what.value)
                (keys if name.endswith("=") else others).add(name.removesuffix("="))
    assert others == {"schedule", "weights"}, "of pipeline.schedule, and of no configuration"
    assert keys | {"pipeline.schedule"} == {*CODE, "data.source"}
    table = re.findall(r"^\| `([a-z_.]+)` \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert {key for key in table if "." in key} == {*CODE, "data.source"}
