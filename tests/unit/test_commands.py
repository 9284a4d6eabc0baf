"""The console command and the configurations that it finds, from any folder."""

import contextlib
import io
import runpy
import sys
import tempfile
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from megapipe import cli, console
from megapipe.command_line import Parser, load_torch, phase, run_command
from megapipe.config import presets
from megapipe.errors import LaunchError
from megapipe.evaluate import commands as evaluate
from megapipe.launch import doctor, launcher
from megapipe.launch.launch_info import LaunchInfo
from megapipe.launch.launcher import launch
from megapipe.launch.shutdown import end_early
from megapipe.plan.moe import commands as experts
from megapipe.schedule import commands as schedule_command

ROOT = Path(__file__).resolve().parents[2]


def test_the_entry_point_is_there() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\nmegapipe = "megapipe.console:main"\n' in project


def test_commands_are_those_of_the_scripts() -> None:
    scripts = [ROOT / "train.py", *(ROOT / "scripts").glob("*.py")]
    names = {path.stem.replace("_", "-"): path.read_text() for path in scripts}
    assert names.keys() == console.COMMANDS.keys() - {"config", "launch", "summary", "completion"}
    for name, text in names.items():
        assert f"from {console.COMMANDS[name][0]} import main\n" in text


@pytest.mark.parametrize("name", sorted(console.COMMANDS.keys() - {"train"}))
def test_each_command_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["megapipe", name, "--help"])
    with contextlib.suppress(SystemExit):
        console.main()
    out, err = capsys.readouterr()
    assert f"usage: megapipe {name} " in out + err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 0, "usage: megapipe COMMAND"),
        (["-h"], 0, "usage: megapipe COMMAND"),
        (["--version"], 0, "megapipe 0."),
        (["trian"], 2, "megapipe: error: unknown command 'trian'; did you mean train?\n"),
        (["x\ny"], 2, "megapipe: error: unknown command 'x\\ny'; expected one of train, generate,"),
    ],
)
def test_what_is_no_command(
    arguments: list[str],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["megapipe", *arguments])
    assert console.main() == code
    out, err = capsys.readouterr()
    assert (out or err).startswith(says)
    assert not (out and err)


@pytest.mark.parametrize(
    "argv",
    [
        ["schedule", "show", "no_such_schedule"],
        ["checkpoint", "verify", "no/such/run"],
        ["prepare-data", "inspect", "no/such/file"],
        ["convert", "export", "no/such/run", "out"],
        ["generate", "no/such/run"],
        ["evaluate", "perplexity", "no/such/run"],
        ["summary", "no/such/run"],
        ["doctor", "--no-such-option"],
    ],
    ids=lambda argv: argv[0],
)
def test_an_error_with_where_it_arose(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["--traceback"]):
        monkeypatch.setattr(sys, "argv", ["megapipe", *argv, *more])
        assert console.main() not in (0, 1)
        *above, line = capsys.readouterr().err.splitlines()
        assert line.startswith("megapipe: error: ")
        assert bool(above) == bool(more)
        if above:
            assert above[0] == "Traceback (most recent call last):"


PROGRAMS = [
    *("train.py", "megapipe/launch/__main__.py"),
    *(f"scripts/{path.name}" for path in sorted((ROOT / "scripts").glob("*.py"))),
    *(f"megapipe/__main__.py {name}" for name in console.COMMANDS),
]


def end_of(program: str, body: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Return the exit code of a program; the module of its command does `body` when loaded."""
    path, *names = program.split()
    parts = Path(path).with_suffix("").parts
    name = names[0] if names else parts[-1 - (parts[-1] == "__main__")].replace("_", "-")
    place = folder / "loaded.py"
    place.write_text(body)
    module = console.COMMANDS[name][0]
    monkeypatch.delitem(sys.modules, module, raising=False)

    class Finder(MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
            return spec_from_file_location(name, place) if name == module else None

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["megapipe", name])
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        runpy.run_path(str(ROOT / path), run_name="__main__")
    assert isinstance(ended.value, SystemExit)
    return ended.value.code


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_interrupt_while_a_command_loads_is_an_exit_code(
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The module of the command is one that presses Ctrl-C as it is loaded."""
    presses = "import signal\nsignal.raise_signal(signal.SIGINT)\n"
    assert end_of(program, presses, tmp_path, monkeypatch) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_command_without_a_folder_for_temporary_files_says_so(
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The module of the command looks for one as it is loaded, as torch does."""
    looks = "import tempfile\ntempfile.gettempdir()\n"
    no_temporary_folder(monkeypatch)
    assert end_of(program, looks, tmp_path, monkeypatch) == 4
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("megapipe: error: no temporary file can be written to ['/nowhere']: ")


def no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])


def test_torch_is_not_loaded_without_a_folder_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands, launchers and ranks end, and the first rank of each node says why. The doctor
    finds it wrong."""
    no_temporary_folder(monkeypatch)
    for name in [*sys.modules]:
        if name.partition(".")[0] == "torch":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for load in (load_torch, lambda: launch(["train.py"], nproc=1)):
        with pytest.raises(LaunchError, match=r"^no temporary file can be written"):
            load()
    for rank in range(4):
        assert end_early(LaunchError("why"), LaunchInfo(rank, 4, rank % 2, 2, launched=True)) == 4
    assert capsys.readouterr().err == 2 * "megapipe: error: why\n"
    assert "torch" not in sys.modules
    (found,) = (finding for finding in doctor.host({}) if finding.what == "temporary")
    assert found.state == "wrong"
    assert [*doctor.gpus()] == []


def test_a_terminal_need_not_know_every_character(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    parser = Parser()
    parser.set_defaults(run=lambda given: print("日本"))
    assert run_command(parser, []) == 0
    assert out.buffer.getvalue() == b"\\u65e5\\u672c\n"  # type: ignore[attr-defined]


def test_a_file_comes_before_a_preset_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert presets.find("quickstart") == ROOT / "configs/quickstart.yaml"
    assert presets.find("other/quickstart.yaml") == Path("other/quickstart.yaml")
    assert presets.find("quickstart.yaml") == Path("quickstart.yaml")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.yaml").write_text("run:\n  name: mine\n")
    assert cli.parse(["configs/quickstart.yaml"]).config.run.name == "mine"
    assert cli.parse(["quickstart"]).config.run.name == "quickstart"
    (tmp_path / "quickstart").write_text("run:\n  name: own\n")
    assert cli.parse(["quickstart"]).config.run.name == "own"
    with pytest.raises(cli.ConfigError, match=r"quickstrat: no such file; did you mean quickstart"):
        cli.parse(["quickstrat"])


class Stream(io.StringIO):
    """A stream that keeps what is written to it, and may be a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("term", "is_terminal", "in_logs", "before", "after"),
    [
        ("xterm", True, False, "\r\x1b[2Kmegapipe: thinking ...\r", "\r\x1b[2K"),
        ("dumb", True, False, "megapipe: thinking ...\n", ""),
        ("xterm", False, False, "", ""),
        ("xterm", False, True, "megapipe: thinking ...\n", ""),
    ],
)
def test_a_phase_is_announced_before_it_begins(
    term: str,
    is_terminal: bool,
    in_logs: bool,
    before: str,
    after: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", term)
    with phase("thinking", in_logs=in_logs):
        assert stream.getvalue() == before
    assert stream.getvalue() == before + after
    monkeypatch.setattr(sys, "stderr", None)
    with phase("thinking", in_logs=True):
        pass


def test_loading_torch_is_announced_where_it_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import sys\nprint('here', file=sys.stderr)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", sys)  # afterwards it is as it was
    del sys.modules["torch"]
    stream = Stream(True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "dumb")
    for _ in range(2):
        load_torch()
    assert stream.getvalue() == "megapipe: loading torch ...\nhere\n"


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        ("schedule", ["simulate", "1f1b", "--advance=1"], ["simulate", "1f1b", "--extra-warmup=1"]),
        (
            "schedule",
            ["simulate", "interleaved_1f1b", "--group", "2"],
            ["simulate", "interleaved_1f1b", "--microbatch-group-size", "2"],
        ),
        ("launch", ["--restarts", "1"], ["--max-restarts", "1"]),
    ],
)
def test_old_names_of_options_are_taken(
    command: str, old: list[str], new: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A line tells the new one, and the command does the same."""
    size = ["--ranks", "2", "--microbatches", "4"] if command == "schedule" else []
    shown = []
    for given in (old, new):
        if command == "launch":
            with pytest.raises(SystemExit):
                launcher.main([*given, "--nproc", "0", "train.py"])
        else:
            assert schedule_command.main([*given, *size, "--json"]) == 0
        shown.append(capsys.readouterr())
    assert shown[0].out.partition("seconds")[0] == shown[1].out.partition("seconds")[0]
    told = f"megapipe: {old[-1 if '=' in old[-1] else -2].partition('=')[0]} is called "
    assert told in shown[0].err
    assert "is called" not in shown[1].err


def test_old_names_of_commands_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    for main, old, new in (
        (experts.main, "plan", "rebalance"),
        (evaluate.main, "choices", "multiple-choice"),
    ):
        with contextlib.suppress(SystemExit):
            main([old, "--help"])
        shown = capsys.readouterr()
        assert shown.err == (
            f"megapipe: {old} is called {new}; the old name works for one more release\n"
        )
        assert f" {new} " in shown.out
