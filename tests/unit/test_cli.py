"""The command line: every mistake is one line that says where, what, and what would be right."""

import os
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe import cli, errors
from megapipe.config.config import Config
from megapipe.config.data import DataConfig, MixtureSource
from megapipe.config.help import _about, help_text
from megapipe.config.keys import KEYS, SECTIONS, expected
from megapipe.config.model import ModelConfig
from megapipe.config.section import documentation
from megapipe.errors import ConfigError


def message(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        cli.parse(argv)
    text = str(caught.value)
    assert text.isprintable(), "one line"
    return text


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_nothing_given() -> None:
    command = cli.parse([])
    assert command.config == Config()
    assert (command.dry_run, command.help, command.where) == (False, None, "defaults")


def test_file_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "model:\n  layers: 6\n  hidden: 64\noptimizer:\n  lr: 1e-4\nlog:\n")
    overrides = ["model.layers=8", "pipeline.stage_layout=[3, 5]", "log.wandb=off"]
    overrides += ["optimizer.max_grad_norm=null", "data={source: x, text_field: y}"]
    command = cli.parse(["model.layers=7", path, "--dry-run", *overrides])
    config = command.config
    assert (config.model.layers, config.model.hidden) == (8, 64)
    assert config.optimizer.lr == 1e-4
    assert config.optimizer.max_grad_norm is None
    assert config.pipeline.stage_layout == [3, 5]
    assert config.log.wandb == "off"
    assert (config.data.source, config.data.text_field) == ("x", "y")
    assert command.dry_run
    assert command.where == f"{path} and command line"


@pytest.mark.parametrize(
    ("argv", "topic"),
    [
        (["--help"], ""),
        (["nonsense", "-h"], ""),
        (["x.yaml", "--help", "nope=1"], ""),
        (["-h", "x.yaml"], ""),
        (["--help", "--dry-run"], ""),
        (["--help", "optimizer"], "optimizer"),
        (["x.yaml", "-h", "optimizer.lr"], "optimizer.lr"),
    ],
)
def test_help_wins(argv: list[str], topic: str) -> None:
    assert cli.parse(argv).help == topic


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        # unknown keys
        ("pipline.schedul=x", "pipline.schedul=x: unknown key; did you mean pipeline.schedule?"),
        ("tp=2", "did you mean parallel.tp?"),
        ("model.lr=2", "did you mean optimizer.lr?"),
        ("model.layer=2", "did you mean model.layers?"),
        ("lyaers=2", "did you mean model.layers?"),
        ("model.layers.x=2", "did you mean model.layers?"),
        ("parallel.qq=2", "unknown key; parallel has dp, tp, pp, cp,"),
        ("qqqq.www=2", "unknown key; the sections are run, model, lora, parallel,"),
        ("=2", "unknown key; the sections are"),
        ("model=3", "model is a section; write model.KEY"),
        ("model={layers: 2, nope: 1}", "model.nope=1: unknown key"),
        # wrong types
        ("model.layers=four", "model.layers=four: expected a whole number >= 1"),
        ("model.layers='4'", "model.layers='4': expected a whole number >= 1"),
        ("model.layers=0", "expected a whole number >= 1"),
        ("model.layers=1.0", "model.layers=1.0: expected a whole number"),
        ("model.layers=1e2", "model.layers=100.0: expected a whole number"),
        ("model.layers=010", "expected a whole number"),
        ("model.layers=true", "expected a whole number"),
        ("model.layers=[4]", "model.layers=[4]: expected a whole number"),
        ("model.layers=", "model.layers=null: expected a whole number"),
        ("model.kv_heads=0", "expected a whole number >= 1, or null"),
        ("model.dropout=1", "model.dropout=1: expected a number >= 0 and < 1"),
        ("optimizer.lr=nan", "optimizer.lr=nan: expected a number >= 0"),
        ("run.deterministic=yes", "run.deterministic=yes: expected true or false"),
        ("run.deterministic=1", "run.deterministic=1: expected true or false"),
        ("run.name=..", "run.name=..: expected up to 100 letters, digits, dots, underscores and"),
        ("run.name=3", "run.name=3: expected up to 100 letters"),
        ("run.name=a%a", "run.name=a%a: %a is for job arrays: expected SLURM_ARRAY_TASK_ID to be"),
        ("run.name=%b", "run.name='%b': expected up to 100 letters"),
        ("optimizer.warmup_steps=2.0", "=2.0: expected a whole number of steps, a share of"),
        ("optimizer.warmup_steps=-0.1", "a share of train.steps below 1 such as 0.02, or null"),
        ("run.seed=9223372036854775808", "expected a whole number >= 0 and < 9223372036854775808"),
        ("log.wandb=of", "log.wandb=of: expected one of off, online, offline"),
        ("optimizer.zero=4", "expected one of 0, 1, 2, 3"),
        ("optimizer.zero=true", "optimizer.zero=true: expected one of 0, 1, 2, 3"),
        ("optimizer.zero=1.0", "optimizer.zero=1.0: expected one of 0, 1, 2, 3"),
        ("parallel.cp=0", "parallel.cp=0: expected a whole number >= 1"),
        ("pipeline.chunks=0", "pipeline.chunks=0: expected a whole number >= 1, or null"),
        (
            "pipeline.sequence_slices=1.5",
            "pipeline.sequence_slices=1.5: expected a whole number >= 1, or null",
        ),
        (
            "pipeline.activation_limit=0",
            "pipeline.activation_limit=0: expected a number > 0, or null",
        ),
        ("pipeline.chimera_pair=2", "did you mean pipeline.options.chimera_pairs?"),
        ("pipeline.stage_layout=3", "expected text, or a list, each item a whole number, or null"),
        ("pipeline.stage_layout=[1, x]", "pipeline.stage_layout=[1, x]: expected text, or a list"),
        # values that are no YAML of ours
        ("optimizer.lr=.nan", "optimizer.lr=.nan: .nan is not a finite number"),
        ("data.source=!!str x", "the tag"),
        ("model.layers=[", "model.layers=[: not valid YAML"),
        ("data.source=\ud800", "is not allowed"),
        # arguments
        ("--model.layers=3", "unknown option --model.layers=3; write model.layers=3"),
        ("--foo", "unknown option --foo; usage: megapipe train ["),
        ("--a\nb", "unknown option"),
        ("parallel.tp", "parallel.tp has no value; write parallel.tp=VALUE"),
    ],
)
def test_bad_argument(argument: str, words: str) -> None:
    text = message(argument)
    assert text.startswith("command line: ")
    assert words in text


def test_a_plan_or_times() -> None:
    assert cli.parse(["--time-slices"]).time_slices
    assert not cli.parse(["--dry-run"]).time_slices
    words = "command line: --dry-run and --time-slices: expected one of them"
    assert message("--time-slices", "model.layers=2", "--dry-run") == words


def test_rows_that_a_plan_is_for() -> None:
    """Exact, so that 1.1 times 10 rows are 11."""
    for argv in (["--imbalance", "1.1", "--dry-run"], ["--dry-run", "--imbalance=1.1"]):
        assert cli.parse([*argv, "model.layers=2"]).imbalance == Fraction(11, 10)
    assert cli.parse(["--dry-run"]).imbalance is None
    words = "command line: --imbalance needs --dry-run: it changes only the plan"
    assert message("--imbalance", "2") == words
    for text in ("0.99", "-2", "nan", "inf", "1e999", "x"):
        words = f"command line: --imbalance {text}: expected a number >= 1"
        assert message("--dry-run", "--imbalance", text) == words
    assert "--imbalance without a value: expected a" in message("--dry-run", "--imbalance")


def test_what_is_planned_for() -> None:
    """Options that are short for keys, and override them as later values do."""
    for argv in (["--gpus", "64", "--device", "H100"], ["--gpus=64", "--device=H100"]):
        plan = cli.parse(["plan.gpus=8", *argv, "--dry-run", "plan.device=A100"]).config.plan
        assert (plan.gpus, plan.device) == (64, "H100")
    assert cli.parse(["plan.gpus=8"]).config.plan.gpus == 8, "as a key also of a run"
    assert message("--dry-run", "--gpus", "0") == (
        "command line: plan.gpus=0: expected a whole number >= 1, or null"
    )
    assert message("--gpus", "--dry-run") == (
        "command line: --gpus without a value: expected a whole number >= 1, or null"
    )
    assert message("--dry-run", "--device") == (
        "command line: --device without a value: expected text, or null"
    )


@pytest.mark.parametrize("option", [["--gpus", "8"], ["--device", "H100"], ["--json"]])
def test_options_of_a_plan(option: list[str]) -> None:
    words = f"command line: {option[0]} needs --dry-run: it changes only the plan"
    assert message(*option) == message(*option, "--time-slices") == words


def test_a_plan_as_json() -> None:
    assert cli.parse(["--dry-run", "--json"]).as_json
    assert not cli.parse(["--dry-run"]).as_json


def test_long_values_are_cut() -> None:
    assert len(message("model.layers=" + "x" * 10000)) < 200


def test_several_problems() -> None:
    text = message("model.layers=a", "model.layers=b", "model.hidden=c", "nope=1")
    assert text.startswith("command line: nope=1: unknown key")
    assert text.endswith("(and 2 more)")
    assert "layers=b" in message("model.layers=a", "model.layers=b")


def test_two_files() -> None:
    assert "a.yaml and b.yaml: expected one configuration file" in message("a.yaml", "b.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model:\n  layers: four\n", ":2: model.layers=four: expected a whole number"),
        ("model:\n  layers: 4\n  lyaers: 4\n", ":3: model.lyaers=4: unknown key; did you mean"),
        ("model:\n  layers: 4\n  layers: 4\n", ":3: model.layers is given twice, first in line 2"),
        ("model:\n  layers: 4\n hidden: 4\n", ":3: not valid YAML"),
        ("model: 3\n", ":1: model=3: model is a section"),
        ("model:\n  layers: *x\n", ":2: anchors and aliases are not allowed"),
        ("model:\n  layers: !!int 4\n", ":2: the tag"),
        ("optimizer:\n  lr: .inf\n", ":2: .inf is not a finite number"),
        ("just words\n", ":1: expected sections"),
        ("[1, 2]", ":1: expected sections"),
        (b"model:\n  layers: \xff\n", ":2: not UTF-8 text"),
        (b"model:\n  layers: \x01\n", ":2: the character '\\x01' is not allowed"),
        (b"#" * (1 << 20) + b"##", ": larger than 1048576 bytes"),
    ],
)
def test_bad_file(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = write(tmp_path, text)
    assert message(path).startswith(path + words)


def test_unreadable_files(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert (
        message(str(tmp_path / "d.yaml"))
        == f"{tmp_path}/d.yaml: no such file; did you mean {path}?"
    )
    assert "no such file" in message("no/such/place.yaml")
    assert "is not a file" in message(str(tmp_path))
    assert "no such file" in message("a\nb\x00")
    assert message(path + "/x").startswith(path)
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in message(str(tmp_path / "pipe"))


@pytest.mark.parametrize("text", ["", "# only a comment\n", "model:\n", "---\n"])
def test_a_file_without_a_key_is_refused(text: str, tmp_path: Path) -> None:
    """A redirect that failed leaves one behind."""
    path = write(tmp_path, text)
    assert message(path) == (f"{path} has no keys: expected sections with keys, such as 'model:'")


def test_what_a_file_says_can_be_taken_away(tmp_path: Path) -> None:
    path = write(tmp_path, "model:\n  norm: rmsnorm\n  layers: 7\ndata:\n  source: x\n")
    taken = cli.parse([path, "model.norm=unset"]).config
    assert (taken.model.norm, taken.model.layers) == ("layernorm", 7)
    taken = cli.parse(["model=unset", "data=unset", path, "model.heads=2"]).config
    assert taken.model == ModelConfig(heads=2)
    assert taken.data == DataConfig()
    given = ["model.norm=rmsnorm", "model.norm=unset", "model.layers=3"]
    assert cli.parse(given).config.model == ModelConfig(layers=3), "in the order of the arguments"
    assert cli.parse(['run.name="unset"']).config.run.name == "unset", "quoted it is a word"


@pytest.mark.parametrize(("name", "run"), [("%a", "7"), ("a-%a", "a-7"), ("%a.%a", "7.7")])
def test_tasks_of_a_job_array_have_runs_of_their_own(
    monkeypatch: pytest.MonkeyPatch, name: str, run: str
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    assert cli.parse([f"run.name={name}"]).config.run.name == run


def test_an_entry_of_a_mapping_can_be_taken_away(tmp_path: Path) -> None:
    sources = "data:\n  mixture:\n    web: {source: x}\n    code: {source: y, weight: 2}\n"
    path = write(tmp_path, f"{sources}parallel:\n  elastic_layouts:\n    half: {{pp: 2}}\n")
    taken = cli.parse(
        [path, "data.mixture.web=unset", "parallel.elastic_layouts.half=unset"]
    ).config
    assert list(taken.data.mixture) == ["code"]
    assert taken.parallel.elastic_layouts == {}
    taken = cli.parse([path, "data.mixture.code=unset", "data.mixture.code.source=z"]).config
    assert taken.data.mixture["code"] == MixtureSource(source="z"), "nothing is left of the file's"
    assert cli.parse([path, "data.mixture=unset"]).config.data == DataConfig()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("model.nrom=unset", "model.nrom=unset: unknown key; did you mean model.norm?"),
        ("modle=unset", "modle=unset: unknown key; did you mean model?"),
        ("model.meo=unset", "model.meo=unset: unknown key; model has source, options, layers"),
        ("lr=unset", "lr=unset: unknown key; did you mean optimizer.lr?"),
        (
            "data.mixture.web.weigth=unset",
            "data.mixture.web.weigth=unset: unknown key; expected data.mixture.NAME.source|weight",
        ),
        (
            "data.mixture.wbe=unset",
            "data.mixture.wbe=unset: there is no such entry to unset: data.mixture has web, code",
        ),
        (
            "data.test.wiki=unset",
            "data.test.wiki=unset: there is no such entry to unset: data.test has no entries",
        ),
        (
            "model.source=x:y model=unset",
            (
                "model=unset would unset model.source, which the command line sets before it: "
                "expected model=unset first"
            ),
        ),
        (
            "data.mixture.web.weight=2 data.mixture.web=unset",
            (
                "data.mixture.web=unset would unset data.mixture.web.weight, which the "
                "command line sets before it: expected data.mixture.web=unset first"
            ),
        ),
    ],
)
def test_what_cannot_be_taken_away(given: str, line: str, tmp_path: Path) -> None:
    """A key that is given may be: the last one wins."""
    path = write(tmp_path, "data:\n  mixture:\n    web: {source: x}\n    code: {source: y}\n")
    assert f"command line: {line}" in message(path, *given.split())


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert message(path) == f"{path}: cannot be read: Permission denied"


def test_help_has_every_key() -> None:
    text = help_text("all")
    for key in KEYS:
        section, _, name = key.rpartition(".")
        _, begun, after = text.partition(f"  {key} = ")
        assert begun
        own = documentation(SECTIONS[section])[name]
        shown = " ".join(after.split("\n\n")[0].split())
        assert own.replace(" ", "") in shown.replace(" ", ""), f"{key} is not explained"
    assert max(map(len, text.splitlines())) <= 100


def test_help_on_a_section_or_a_key_is_that_part_of_the_whole() -> None:
    whole = help_text("all")
    parts = [help_text(name) for name in SECTIONS]
    assert "\n".join(parts) in whole
    for name, part in zip(SECTIONS, parts, strict=True):
        keys = [key for key in KEYS if key.rpartition(".")[0] == name]
        assert [key for key in KEYS if f"  {key} = " in part] == keys
        assert all(help_text(key) in part for key in keys)


@pytest.mark.parametrize("columns", [60, 80, 300])
def test_help_is_an_overview_that_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = help_text().splitlines()
    assert max(map(len, lines)) <= min(columns, 96)
    assert len(lines) < 100, "and not as long as all keys"
    for name in SECTIONS:
        (line,) = (each for each in lines if each.startswith(f"  {name} "))
        assert line[15:].strip(), "it says what the section is about"


def test_help_finds_keys_by_a_word() -> None:
    assert help_text("lr").startswith(help_text("optimizer.lr"))
    every = [key for key in KEYS if key.endswith(".every")]
    assert len(every) > 1
    assert help_text("every").startswith("\n".join(map(help_text, every)))
    for word in ("weight decay", "weight_decay", "Weight  Decay"):
        assert help_text(word).startswith(help_text("optimizer.weight_decay"))


def found_by(word: str) -> list[str]:
    return re.findall(r"^  (\w+(?:\.\w+)+) = ", help_text(word), re.MULTILINE)


def test_help_finds_keys_by_what_is_said_of_them() -> None:
    """Keys with the word in their names come first; a part of another word does not count."""
    found = found_by("clip")
    assert found[0] == "optimizer.clip_scope"
    assert {"optimizer.max_grad_norm", "optimizer.post_validation"} <= {*found}
    assert "norm asks for clipping" in " ".join(help_text("clip").split())
    assert found_by("muon")[-1] not in [key for key in KEYS if "muon" in key]
    assert "optimizer.rule" in found_by("muon"), "one of its values"
    assert "checkpoint.async_save" not in found_by("lr"), "already is not about it"


@pytest.mark.parametrize("word", ["step", "rank", "e", "model", "every", "memory", "a"])
def test_help_on_a_frequent_word_can_be_read(word: str) -> None:
    """What does not fit has its name there."""
    text = _about(word)
    assert len(text.splitlines()) < 170
    assert all(key in text for key in KEYS if word in key)


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("/a/train.py", "train.py"),
        ("megapipe train", "megapipe train"),
        ("/usr/bin/pytest", "megapipe train"),
    ],
)
def test_usage_says_how_the_command_was_called(
    called: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    assert f"usage: {name} [CONFIG]" in message("--bad")
    assert help_text().startswith(f"usage: {name} [CONFIG]")


def test_no_key_is_explained_by_a_regular_expression() -> None:
    assert not [key for key, info in KEYS.items() if re.search(r"[\^$\\{}]", expected(info))]


def test_help_on_nothing_there_is_says_what_there_is() -> None:
    assert "no such section or key; did you mean optimizer?" in message("--help", "optimiser")
    assert "did you mean optimizer.lr?" in message("-h", "optimizer.lrr")
    assert "the sections are run, model," in message("--help", "nonsense")


def test_help_has_every_exit_code() -> None:
    text = help_text().partition("exit codes:")[2]
    codes = [int(found) for found in re.findall(r"^ {2,4}(\d+)  ", text, re.MULTILINE)]
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert codes == sorted({0, 130} | {kind.exit_code for kind in kinds})  # type: ignore[attr-defined]


def test_flatten() -> None:
    flat = cli.flatten(cli.parse(["pipeline.stage_layout=[1, 3]", "model.layers=3"]).config)
    assert flat.keys() == KEYS.keys()
    assert flat["pipeline.stage_layout"] == "[1, 3]"
    assert flat["model.layers"] == 3
    assert flat["model.kv_heads"] is None


@pytest.mark.full
@given(
    folder=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lr=st.floats(1e-30, 1e30),
    layout=st.one_of(st.none(), st.lists(st.integers(0, 9)), st.just("E L*3 | L H")),
    clip=st.one_of(st.none(), st.integers(1, 9)),
    debug=st.booleans(),
)
def test_dump_reads_back(
    tmp_path_factory: pytest.TempPathFactory,
    folder: str,
    lr: float,
    layout: object,
    clip: int | None,
    debug: bool,
) -> None:
    config = Config.model_validate(
        {
            "run": {"folder": folder},
            "optimizer": {"lr": lr, "max_grad_norm": clip},
            "pipeline": {"stage_layout": layout, "debug": debug},
        }
    )
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(cli.dump(config), encoding="utf-8")
    assert cli.parse([str(path)]).config == config


@pytest.mark.parametrize(
    "key",
    [
        *("run.folder", "data.cache", "checkpoint.load", "optimizer.offload_folder"),
        *("experts.rebalance_pool", "pipeline.schedule", "parallel.elastic_layouts.half.schedule"),
    ],
)
def test_a_path_may_begin_with_the_home_folder(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for text, path in (("~/x", "/home/me/x"), ("x~/y", "x~/y")):
        config: Any = cli.parse([f"{key}={text}"]).config
        for name in key.split("."):
            config = config[name] if isinstance(config, dict) else getattr(config, name)
        assert config == path


def test_another_source_comes_without_the_parts_of_the_file_s(tmp_path: Path) -> None:
    """They name a subset and a split of that one, and a text has none."""
    (file := tmp_path / "a.yaml").write_text(
        "data:\n  source: hub/set\n  subset: big\n  dataset_split: a\n  text_field: body\n"
    )
    data = cli.parse([str(file), "data.source=mine.jsonl"]).config.data
    assert (data.subset, data.dataset_split, data.text_field) == (None, None, "body")
    data = cli.parse([str(file), "data.source=other/set", "data.subset=small"]).config.data
    assert (data.subset, data.dataset_split) == ("small", None)
    data = cli.parse([str(file), "train.steps=3"]).config.data
    assert (data.subset, data.dataset_split) == ("big", "a")
